"""The packed row, as it goes to the model.

The row of lengths 5 and 3 with ``multiple=4``, ids a1..a5 and b1..b3 (x = -100)::

    input_ids    a1 a2 a3 a4 a5  .  .  . | b1 b2 b3  .
    labels        x a2 a3 a4 a5  x  x  x |  x b2 b3  x
    shift_labels a2 a3 a4 a5  x  x  x  x | b2 b3  x  x
    position_ids  0  1  2  3  4  0  1  2 |  0  1  2  0
    cu_seqlens [0, 5, 8]   cu_seqlens_padded [0, 8, 12]   max_seqlen 8

>>> from lightning_pack.layout import RowLayout
>>> from lightning_pack.source import EncodedSource
>>> a, b = (EncodedSource.of(k, torch.arange(n) + 1) for k, n in (("a", 5), ("b", 3)))
>>> batch = PackedBatch.from_packs([Pack([a, b], RowLayout.of([5, 3], multiple=4))], pad_id=0)
>>> batch.shift_labels.tolist()
[[2, 3, 4, 5, -100, -100, -100, -100, 2, 3, -100, -100]]
>>> batch.position_ids.tolist()
[[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 0]]
>>> batch.cu_seqlens.tolist(), batch.cu_seqlens_padded.tolist(), batch.max_seqlen
([0, 5, 8], [0, 8, 12], 8)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pack.boundaries import check_offsets
from lightning_pack.media import Media, PlainMedia, from_plain, joined, nbytes, to_plain
from lightning_pack.model_arguments import model_arguments
from lightning_pack.notebook import batch_html
from lightning_pack.source import IGNORE, LeftOut, Pack


@dataclass(kw_only=True)
class PackedBatch:
    """One packed row, ready for a model. T is its physical width, N the number of its sources.

    Under ``PackingPolicy(fixed_boundaries=True)`` N in shapes is a fixed number: boundaries beyond those of the sources repeat
    the last offset. The sources are always those of :attr:`source_keys`.

    ``model(**batch)`` passes :meth:`model_inputs` (without a padding mask), so code written for dict batches keeps working.
    """

    #: int64 ``[1, T]``: sources end to end, pad id in gaps.
    input_ids: Tensor
    #: int64 ``[1, T]``: transformers' convention, not shifted; :data:`IGNORE` on first tokens, prompts and pads.
    labels: Tensor
    #: int64 ``[1, T]``: labels moved one place left inside each source; no target crosses a boundary.
    shift_labels: Tensor
    #: bool ``[1, T]``: ``shift_labels != -100``.
    loss_mask: Tensor
    #: int64 ``[1, T]``: restart at 0 at each source, and at each gap. ``[4, 1, T]`` where a source has M-RoPE positions: those
    #: first, then time, height and width, each computed in its source; of gaps and other sources all four are those first.
    position_ids: Tensor
    #: int32 ``[N+1]``: cumulative real lengths.
    cu_seqlens: Tensor
    #: int32 ``[N+1]``: physical offsets, the last is T; the same object as ``cu_seqlens`` where nothing is padded.
    cu_seqlens_padded: Tensor
    #: Longest physical source.
    max_seqlen: int
    #: int32 ``[1, T]``: 1..N on real tokens, 0 on pads.
    segment_ids: Tensor
    source_keys: list[str]
    #: For each source, how many sources its loader worker had read after it when its pack was chosen.
    ages: list[int]
    #: Sources dropped or cut since the previous pack.
    left_out: list[LeftOut]
    #: Tensors of images and the like in source order, by the name of the model's argument; none of a row without.
    media: Media = field(default_factory=dict)
    #: For each of them, how many of its rows belong to each source.
    media_rows: dict[str, list[int]] = field(default_factory=dict)
    #: Largest of :attr:`input_ids` as the row was made, known without asking a device; None of a row that was made there.
    largest_id: int | None = None
    #: Set by Energon.
    __restore_key__: tuple[Any, ...] = ()

    @classmethod
    def from_packs(cls, packs: Iterable[Pack], *, pad_id: int) -> PackedBatch:
        """Concatenate packs into one physical row; gaps are filled with ``pad_id``.

        Raises:
            ValueError: for sources whose media are not made yet, or do not go together, and for a layout of other sources.
        """
        packs = list(packs)
        laid_out = [(pack, pack.layout) for pack in packs if pack.layout is not None]
        width = sum(layout.width for _, layout in laid_out)
        sources = [source for pack, _ in laid_out for source in pack.sources]
        keys = [source.key for source in sources]
        for source in sources:
            if source.deferred is not None:
                raise ValueError(
                    f"the media of sample {source.key!r} are still to be made: give source.completed() to the pack"
                )
        real, physical = [0], [0]
        ages: list[int] = []
        spare = 0
        for pack, layout in laid_out:
            base = physical[-1]
            ages += pack.ages or [0] * len(pack.sources)
            ends = layout.cu_seqlens_padded[1:].tolist()
            spare += len(ends) - len(layout.lengths)
            for source, end in zip(pack.sources, ends[: len(layout.lengths)], strict=True):
                real.append(real[-1] + len(source))
                physical.append(base + end)
        real += [real[-1]] * spare
        physical += [physical[-1]] * spare
        # Here and not at the kernels: boundaries of a layout that was made for other sources mix them without an error.
        check_offsets(real, physical, width=width, source_keys=keys)
        input_ids = torch.full((1, width), pad_id, dtype=torch.int64)
        labels = torch.full((1, width), IGNORE, dtype=torch.int64)
        for source, start in zip(sources, physical, strict=False):
            filled = slice(start, start + len(source))
            input_ids[0, filled] = source.input_ids
            labels[0, filled] = source.labels
            # Also where an encoder says otherwise: it would be the target of the source before.
            labels[0, start] = IGNORE
        left_out = [gone for pack in packs for gone in pack.left_out]
        mrope = None
        if any(source.mrope is not None for source in sources):
            mrope = np.repeat(_restarting(*_offsets(real, physical))[None], 3, axis=0)
            for source, start in zip(sources, physical, strict=False):
                if source.mrope is not None:
                    mrope[:, start : start + len(source)] = source.mrope.numpy()
        media, media_rows = joined([(source.key, source.media) for source in sources])
        return cls._of(input_ids, labels, real, physical, keys, ages, left_out, (), mrope, media, media_rows)

    @classmethod
    def _of(
        cls,
        input_ids: Tensor,
        labels: Tensor,
        real: list[int],
        physical: list[int],
        source_keys: list[str],
        ages: list[int],
        left_out: list[LeftOut],
        restore_key: tuple[Any, ...],
        mrope: np.ndarray | None,
        media: Media,
        media_rows: dict[str, list[int]],
    ) -> PackedBatch:
        """The row of these tokens: everything else follows from real and physical offsets."""
        # In numpy: torch would wake its threads for every one of these small operations.
        cu_seqlens = torch.tensor(real, dtype=torch.int32)
        padded = np.diff(physical)
        offset, length = _offsets(real, physical)
        shifted = np.full(labels.shape, IGNORE)
        shifted[:, :-1] = labels.numpy()[:, 1:]
        number = np.repeat(np.arange(1, len(padded) + 1, dtype=np.int32), padded)
        shift_labels = torch.from_numpy(shifted)
        text = _restarting(offset, length)[None]
        batch = cls(
            input_ids=input_ids,
            labels=labels,
            shift_labels=shift_labels,
            loss_mask=torch.from_numpy(shifted != IGNORE),
            position_ids=torch.from_numpy(text if mrope is None else np.concatenate([text, mrope])[:, None]),
            cu_seqlens=cu_seqlens,
            cu_seqlens_padded=cu_seqlens if real == physical else torch.tensor(physical, dtype=torch.int32),
            max_seqlen=int(padded.max(initial=0)),
            segment_ids=torch.from_numpy(np.where(offset < length, number, np.int32(0)))[None],
            source_keys=source_keys,
            ages=ages,
            left_out=left_out,
            media=media,
            media_rows=media_rows,
            largest_id=int(input_ids.numpy().max(initial=0)),
        )
        batch.__restore_key__ = restore_key
        return batch

    @property
    def width(self) -> int:
        """T, in tokens."""
        return self.input_ids.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        fixed = {id(value): value.nbytes for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        return sum(fixed.values()) + nbytes(self.media)

    def target_tokens(self) -> Tensor | int:
        """Targets of the row; an int64 scalar on its device, or a number where that is known."""
        return self.loss_mask.sum()

    def token_mean(self, total: Tensor) -> Tensor:
        """Mean loss over the target tokens of the row, ``[]``, for a log; 0 where it has none.

        Args:
            total: sum of the losses of the targets in :attr:`shift_labels`, ``[]``, without a gradient.
        """
        return total / self.loss_mask.sum().clamp(min=1)

    def padding_mask(self) -> Tensor:
        """Bool ``[1, T]``, True on pads: alignment, gaps and the tail.

        For routers of mixture-of-experts models, which must not count pads. The opposite of an ``attention_mask``.
        """
        return self.segment_ids == 0

    def model_inputs(self, model: torch.nn.Module | None = None) -> dict[str, Any]:
        """Keyword arguments of a transformers causal model, boundaries physical (safe for causal attention everywhere).

        Args:
            model: the module that they are for; one whose ``forward`` names ``padding_mask`` gets :meth:`padding_mask` too.
                None, and any other model, gets no such argument.
        """
        return model_arguments(self, model)

    def __repr__(self) -> str:
        real, width = int(self.cu_seqlens[-1]), self.width
        return (
            f"PackedBatch({len(self.source_keys)} sources, {real} real tokens in a row of {width}, {real / max(width, 1):.1%}, "
            f"{len(self.left_out)} left out, on {self.input_ids.device})"
        )

    def _repr_html_(self) -> str:
        return batch_html(self)

    #: ``**batch`` needs item access, which must not make a batch look like a sequence.
    __iter__ = None

    def keys(self) -> Iterable[str]:
        """Names that ``model(**batch)`` passes."""
        return self.model_inputs().keys()

    def __getitem__(self, name: str) -> Any:
        return self.model_inputs()[name]

    def to(self, device: torch.device | str, *, non_blocking: bool | None = None) -> PackedBatch:
        """A copy with every tensor on ``device``; does not block for pinned memory unless told to."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=tensor.is_pinned() if non_blocking is None else non_blocking)

        return self._map(move)

    def pin_memory(self) -> PackedBatch:
        """A copy in page-locked memory; called by torch's DataLoader where there is an accelerator."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> PackedBatch:
        # Each tensor is changed once, so one object in two fields stays one object.
        changed: dict[int, Tensor] = {}
        values = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                if id(value) not in changed:
                    changed[id(value)] = change(value)
                value = changed[id(value)]
            elif f.name == "media":
                value = {name: change(tensor) for name, tensor in value.items()}
            values[f.name] = value
        return type(self)(**values)


def _offsets(real: list[int], physical: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Offset of each position in its own physical source, and how many of that source's tokens are real."""
    starts, lengths, padded = np.array(physical[:-1], dtype=np.int64), np.diff(real), np.diff(physical)
    return np.arange(physical[-1]) - np.repeat(starts, padded), np.repeat(lengths, padded)


def _restarting(offset: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Text positions of :func:`_offsets`: they restart at each source and at each gap."""
    return np.where(offset < length, offset, offset - length)


def _send(batch: PackedBatch) -> tuple[Any, ...]:
    tokens = torch.cat([batch.input_ids, batch.labels]).numpy().tobytes()
    offsets = (batch.cu_seqlens.tolist(), batch.cu_seqlens_padded.tolist())
    news = (batch.source_keys, batch.ages, batch.left_out, batch.__restore_key__)
    mrope = None if batch.position_ids.ndim == 2 else batch.position_ids[1:, 0].numpy()
    return _receive, (tokens, *offsets, news, mrope, to_plain(batch.media), batch.media_rows)


def _receive(
    tokens: bytes,
    real: list[int],
    physical: list[int],
    news: tuple[Any, ...],
    mrope: np.ndarray | None,
    media: PlainMedia,
    media_rows: dict[str, list[int]],
) -> PackedBatch:
    both = np.frombuffer(bytearray(tokens), dtype=np.int64).reshape(2, 1, -1)
    ids, labels = torch.from_numpy(both[0]), torch.from_numpy(both[1])
    keys, ages, left_out, restore_key = news
    return PackedBatch._of(ids, labels, real, physical, keys, ages, left_out, restore_key, mrope, from_plain(media), media_rows)


# From a loader worker a row comes as one message: to share ten small tensors between processes costs more than to make them.
ForkingPickler.register(PackedBatch, _send)
