"""Rows as they were written, on the way that sources take: a record is a row, and its encoding is the row with its boundaries.

The loader's stages are those of any stream: they shuffle, number and restore records. What differs is that a record is a whole
pack, so the buffer holds one, and :class:`ReplayPolicy` lets it through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_pack.layout import RowLayout
from lightning_pack.media import MediaStore
from lightning_pack.offline.manifest import Manifest
from lightning_pack.offline.row_file import DamagedRowError, Row
from lightning_pack.policy import PackingPolicy
from lightning_pack.source import EncodedSource, LeftOut, Pack


@dataclass(kw_only=True, repr=False)
class StoredRow(EncodedSource):
    """A packed row as it was written: :attr:`input_ids` and :attr:`labels` are those of all its sources, end to end."""

    #: Sources and boundaries; None for a row that is left out.
    pack: Pack | None
    #: Sources that are left out.
    gone: list[LeftOut] = field(default_factory=list)

    @property
    def news(self) -> list[LeftOut]:
        """What was left out of it, or instead of it."""
        return self.gone

    @property
    def held_media(self) -> int:
        """Bytes of the media of its sources."""
        return 0 if self.pack is None else sum(source.held_media for source in self.pack.sources)


class RowEncoder:
    """Members of a row -> row.

    What cannot be used is left out: a source without tokens or with damaged files of its row, and a damaged row whole.

    Args:
        manifest: of the rows.
        media: puts sources and their files together, for rows with media.
    """

    #: It is given the members of a sample, and not a record.
    reads_parts = True

    def __init__(self, manifest: Manifest, *, media: MediaStore | None = None) -> None:
        if manifest.media and media is None:
            raise ValueError("the rows hold images or the like: media is needed, which makes tensors of them")
        #: Policies may limit media, and what is made for text alone refuses them.
        self.has_media = manifest.media
        self._media = media if manifest.media else None
        #: What is done with images, to be compared with the model.
        self.images = getattr(media, "images", media)
        self.pad_id = manifest.pad_id
        #: Fingerprint of what made the tokens; empty where that is not known.
        self.made_by = manifest.encoder
        self._rows = manifest.digest
        self._fixed = bool(manifest.packing.get("fixed_boundaries"))
        policy = manifest.policy()
        self._widest = max(policy.capacity, policy.row_width or 0)

    def __call__(self, key: str, record: Mapping[str, Any]) -> StoredRow:
        """The row whose members are ``record``; one without any tokens names what is left out in its :attr:`StoredRow.news`."""
        try:
            row = Row.of(record, key=key)
        except DamagedRowError as e:
            return _damaged(key, e.sources)
        # Media that the manifest knows nothing of, or tensors of a size that nobody asked for.
        if (row.files is not None) != self.has_media or row.offsets[-1] > self._widest:
            return _damaged(key, tuple(zip(row.keys, row.lengths, strict=True)))
        gone = []
        for place, (source, length) in enumerate(zip(row.keys, row.lengths, strict=True)):
            if not length or place in row.broken:
                gone.append(LeftOut(source, "damaged" if place in row.broken else "empty", length))
        kept = [place for place, length in enumerate(row.lengths) if length and place not in row.broken]
        if not kept:
            return _left_out(key, gone or [LeftOut(key, "empty", 0)])
        ids, labels = (torch.from_numpy(of).split(list(row.lengths)) for of in row.tokens.astype(np.int64))
        sources = [
            EncodedSource(key=row.keys[place], input_ids=ids[place], labels=labels[place], group=row.group) for place in kept
        ]
        if self._media is not None:
            assert row.files is not None
            sources = [self._media.with_files(source, row.files[place]) for source, place in zip(sources, kept, strict=True)]
        layout = _layout(row, kept, fixed=self._fixed)
        pack = Pack(sources=sources, layout=layout, left_out=gone, ages=[0] * len(sources))
        return StoredRow(
            key=key,
            input_ids=torch.cat([source.input_ids for source in sources]),
            labels=torch.cat([source.labels for source in sources]),
            media_tokens=sum(source.media_tokens for source in sources),
            media_bytes=sum(source.media_bytes for source in sources),
            pack=pack,
            gone=gone,
        )

    def fingerprint(self) -> dict[str, Any]:
        """Plain values that are equal exactly for the same rows."""
        return {"encoder": "packed rows", "rows": self._rows}


def _damaged(key: str, sources: Sequence[tuple[str, int]]) -> StoredRow:
    return _left_out(key, [LeftOut(source, "damaged", tokens) for source, tokens in sources] or [LeftOut(key, "damaged", 0)])


def _left_out(key: str, gone: list[LeftOut]) -> StoredRow:
    none = torch.empty(0, dtype=torch.int64)
    return StoredRow(key=key, input_ids=none, labels=none, pack=None, gone=gone, left_out=gone[0])


def _layout(row: Row, kept: Sequence[int], *, fixed: bool) -> RowLayout:
    """The boundaries that were written; the room of a source that is not kept goes to the row's tail, so its width stays."""
    room = np.diff(row.offsets)
    count = len(row.lengths)
    rooms = [int(room[i]) for i in kept]
    rooms[-1] += int(row.offsets[-1]) - sum(rooms)
    lengths = [row.lengths[i] for i in kept]
    spare = len(room) - (len(kept) if fixed else count)
    real = np.cumsum([0, *lengths, *[0] * spare]).tolist()
    physical = np.cumsum([0, *rooms, *[0] * spare]).tolist()
    cu_seqlens = torch.tensor(real, dtype=torch.int32)
    return RowLayout(
        lengths=tuple(lengths),
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=cu_seqlens if real == physical else torch.tensor(physical, dtype=torch.int32),
        max_seqlen=max(rooms),
        width=physical[-1],
    )


@dataclass(frozen=True)
class ReplayPolicy(PackingPolicy):
    """The policy that decided some rows, as the loader uses it: each row is a pack, in the order in which it is read."""

    @classmethod
    def of(cls, manifest: Manifest, *, balance: Any = None, window: int | None = None) -> ReplayPolicy:
        """For the rows of a manifest; ``balance`` and ``window`` only order them."""
        decided = asdict(manifest.policy()) | {"buffer_size": 1, "min_bins": None, "bins_multiple_of": 1}
        return cls(**decided | {"balance": balance, "window": window})

    def admit(self, source: EncodedSource, *, needs_targets: bool = True) -> list[EncodedSource]:
        """The row itself: what is too long, or has no target, was seen to when it was written."""
        return [source]

    def select(
        self,
        buffer: Sequence[EncodedSource],
        *,
        ages: Sequence[int] | None = None,
        final: bool = False,
        worker: int = 0,
        index: int = 0,
    ) -> list[list[EncodedSource]]:
        """Each row by itself; rows that are left out ride along with the first."""
        groups = [[row] for row in buffer if len(row)]
        gone = [row for row in buffer if not len(row)]
        if gone:
            groups[:1] = [(groups[0] if groups else []) + gone]
        return groups

    def build(self, group: Sequence[EncodedSource]) -> Pack:
        """The pack that was written."""
        rows = [row for row in group if len(row)]
        if not rows or not isinstance(rows[0], StoredRow):
            return super().build(group)
        (row,) = rows
        assert isinstance(row, StoredRow)
        assert row.pack is not None
        return Pack(
            sources=row.pack.sources,
            layout=row.pack.layout,
            left_out=[gone for each in group for gone in each.news],
            ages=list(row.pack.ages),
        )
