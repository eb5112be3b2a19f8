"""PackingPolicy: which sources share a row, where each lies in it, and what happens to those that fit in none.

This is the one place where packing rules live. The loader's two hooks call :meth:`PackingPolicy.select` (buffer -> groups)
and :meth:`PackingPolicy.build` (group -> pack); the encoder's output goes through :meth:`PackingPolicy.admit` first, so that
nothing over-long, empty or without a target ever reaches the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from lightning_pack.binning import get_packer
from lightning_pack.layout import RowLayout
from lightning_pack.row import IGNORE, EncodedSource, LeftOut, Pack

Overlength = Literal["drop", "truncate", "split", "error"]


class OverlengthError(ValueError):
    """A source is longer than a row may be, and the policy says ``overlength="error"``."""


@dataclass(frozen=True)
class PackingPolicy:
    """How sources become packs.

    Args:
        capacity: most tokens a pack may hold, alignment included.
        algorithm: name of a registered packer, see :mod:`lightning_pack.binning`.
        buffer_size: candidates that one loader worker holds to choose from, in sources.
        multiple: every source is padded to a multiple of this, in tokens (see :class:`~lightning_pack.ParallelLayout`).
        width: ``"variable"`` rows are as wide as their sources need; ``"fixed"`` rows are ``capacity`` wide; a number of tokens
            fixes another width. None means ``"variable"``.
        overlength: what happens to a source longer than ``capacity``: ``"drop"`` leaves it out and reports it, ``"truncate"``
            cuts its end off and reports the cut, ``"split"`` makes several sources of a plain text (a piece starts with the
            last token of the piece before as context, so every token stays a target once), ``"error"`` stops the run.
        seed: of the order in which the packs of a buffer are emitted. The longest-first packers would otherwise end every
            buffer with its short sources. ``"concatenative"`` keeps the order of arrival and refuses a seed.

    Raises:
        ValueError: for values that do not fit together.

    Example:
        >>> policy = PackingPolicy(capacity=16, multiple=4)
        >>> policy.pack([5, 3, 6, 7])
        [[0, 2], [3, 1]]
        >>> policy.layout([5, 3]).cu_seqlens_padded.tolist()
        [0, 8, 12]
    """

    capacity: int
    _: KW_ONLY
    algorithm: str = "best_fit_decreasing"
    buffer_size: int = 256
    multiple: int = 1
    width: Literal["variable", "fixed"] | int | None = "variable"
    overlength: Overlength = "drop"
    seed: int = 0

    def __post_init__(self) -> None:
        get_packer(self.algorithm)
        for name, least in (("capacity", 1), ("buffer_size", 1), ("multiple", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: a whole number of at least {least} is needed")
        if self.capacity % self.multiple:
            raise ValueError(
                f"capacity={self.capacity} is not a multiple of multiple={self.multiple}: "
                f"take {self.capacity // self.multiple * self.multiple or self.multiple}"
            )
        if self.overlength not in ("drop", "truncate", "split", "error"):
            raise ValueError(f"overlength={self.overlength!r} is not one of 'drop', 'truncate', 'split', 'error'")
        if self.overlength == "split" and self.capacity < 2:
            raise ValueError("overlength='split' needs a capacity of at least 2 tokens: each piece repeats one as context")
        if self.algorithm == "concatenative" and self.seed:
            raise ValueError(f"seed={self.seed} is not used by algorithm='concatenative', which keeps the order of arrival")
        if self.width is None:
            object.__setattr__(self, "width", "variable")
        self._check_width()

    def _check_width(self) -> None:
        width = self.width
        if width in ("variable", "fixed"):
            return
        if isinstance(width, bool) or not isinstance(width, int):
            raise ValueError(f"width={width!r} is not 'variable', 'fixed' or a number of tokens")
        if width % self.multiple:
            raise ValueError(f"width={width} is not a multiple of multiple={self.multiple}")
        if width < self.capacity:
            raise ValueError(f"width={width} is less than capacity={self.capacity}: a full pack would not fit its row")

    @property
    def row_width(self) -> int | None:
        """Physical width of every row in tokens, None where rows are as wide as their sources need."""
        if self.width == "fixed":
            return self.capacity
        return self.width if isinstance(self.width, int) else None

    def aligned(self, length: int) -> int:
        """Tokens that a source of ``length`` takes up in a row."""
        return -(-length // self.multiple) * self.multiple

    def pack(self, lengths: Sequence[int]) -> list[list[int]]:
        """Groups of indices into ``lengths``: each index once, each group within ``capacity`` after alignment.

        Raises:
            ValueError: for a source without tokens.
            OverlengthError: for a source that fits in no row.
        """
        aligned = []
        for index, length in enumerate(lengths):
            if length < 1:
                raise ValueError(f"source {index} has {length} tokens; a source without tokens cannot be packed")
            if length > self.capacity:
                raise OverlengthError(self._too_long(f"source {index}", length))
            aligned.append(self.aligned(int(length)))
        return get_packer(self.algorithm)(aligned, self.capacity)

    def layout(self, lengths: Sequence[int]) -> RowLayout:
        """Boundaries of the row that holds sources of these real lengths, in this order.

        Raises:
            ValueError: for no sources, a source without tokens, or sources that do not fit the row.
        """
        layout = RowLayout.of(lengths, multiple=self.multiple, width=self.row_width)
        if sum(map(self.aligned, lengths)) > self.capacity:
            raise ValueError(
                f"sources of {list(lengths)} tokens padded to multiples of {self.multiple} need "
                f"{sum(map(self.aligned, lengths))} tokens, more than capacity={self.capacity}"
            )
        return layout

    def admit(self, source: EncodedSource) -> list[EncodedSource]:
        """What may enter the buffer in place of ``source``: itself, pieces of it, or the marker of its absence.

        Raises:
            OverlengthError: under ``overlength="error"``, for a source that fits in no row.
        """
        if source.left_out is not None and not len(source):
            return [source]
        length = len(source)
        if not length:
            return [EncodedSource.dropped(source.key, "empty")]
        if length > self.capacity:
            if self.overlength == "error":
                raise OverlengthError(self._too_long(f"sample {source.key!r}", length))
            if self.overlength == "split" and source.splittable:
                return self._split(source)
            if self.overlength != "truncate":
                return [EncodedSource.dropped(source.key, "overlength", length)]
            source = replace(
                source,
                input_ids=source.input_ids[: self.capacity].clone(),
                labels=source.labels[: self.capacity].clone(),
                left_out=LeftOut(source.key, "truncated", length - self.capacity),
            )
        if bool((source.labels[1:] == IGNORE).all()):
            return [EncodedSource.dropped(source.key, "no_targets", length)]
        return [source]

    def _split(self, source: EncodedSource) -> list[EncodedSource]:
        pieces: list[EncodedSource] = []
        for start in range(0, len(source) - 1, self.capacity - 1):
            part = slice(start, start + self.capacity)
            key = f"{source.key}#{len(pieces)}"
            pieces.append(EncodedSource.of(key, source.input_ids[part].clone(), source.labels[part]))
        return pieces

    def _too_long(self, what: str, length: int) -> str:
        return (
            f"{what} has {length} tokens, more than capacity={self.capacity}: raise the capacity, shorten the data, "
            "or choose overlength='drop' or 'truncate' ('split' for plain text)"
        )

    def select(self, buffer: Sequence[EncodedSource], *, worker: int = 0, index: int = 0) -> list[list[EncodedSource]]:
        """Energon's first hook: groups of the very objects in ``buffer``, each exactly once.

        Markers of left-out sources ride in the first group, so that they are reported as early as possible.

        Args:
            buffer: what the worker holds, markers of left-out sources included.
            worker: global number of the loader worker.
            index: how often this worker has selected before; with ``seed`` and ``worker`` it fixes the order of the groups.
        """
        usable = [source for source in buffer if len(source)]
        groups = [[usable[i] for i in group] for group in self.pack([len(source) for source in usable])]
        if self.algorithm != "concatenative":
            order = np.random.default_rng([self.seed, worker, index]).permutation(len(groups))
            groups = [groups[i] for i in order]
        markers = [source for source in buffer if not len(source)]
        if markers:
            groups[:1] = [(groups[0] if groups else []) + markers]
        return groups

    def build(self, group: Sequence[EncodedSource]) -> Pack:
        """Energon's second hook: the pack of one group."""
        sources = [source for source in group if len(source)]
        return Pack(
            sources=sources,
            layout=self.layout([len(source) for source in sources]) if sources else None,
            left_out=[source.left_out for source in group if source.left_out is not None],
        )

    def fingerprint(self) -> dict[str, Any]:
        """Every setting as plain values; two policies with equal fingerprints pack the same stream the same way."""
        return asdict(self)
