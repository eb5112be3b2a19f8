"""PackingPolicy: which sources share a row, where each lies in it, and what happens to those that fit in none.

This is the one place where packing rules live. The loader's two hooks call :meth:`PackingPolicy.select` (buffer -> groups)
and :meth:`PackingPolicy.build` (group -> pack); the encoder's output goes through :meth:`PackingPolicy.admit` first, so that
nothing over-long, empty or without a target ever reaches the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from functools import wraps
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from lightning_pack import binning
from lightning_pack.binning import Groups
from lightning_pack.carry import Candidates, closed_rows, exact_fill, fullest_half
from lightning_pack.layout import RowLayout
from lightning_pack.media_budget import MediaBudget, MediaCost, within_budget
from lightning_pack.notebook import policy_html
from lightning_pack.overlength import Overlength, OverlengthError, admitted, too_long
from lightning_pack.policy_checks import check_settings
from lightning_pack.source import EncodedSource, Pack

__all__ = ["AUTO", "BYTES_PER_TOKEN", "OverlengthError", "PackingPolicy"]

Balance = Literal["quadratic"]
#: What ``algorithm="auto"`` chooses from.
AUTO = ("exact_fill", "minimum_bin_slack")
#: Sources that it packs on trial.
DRY_RUN_SOURCES = 8192
#: Of a source in memory: its id and its label.
BYTES_PER_TOKEN = 16
#: Turnovers of the buffer.
DEFAULT_AGE_LIMIT = 4.0


_Class = TypeVar("_Class", bound=type)


def _remembers_given(cls: _Class) -> _Class:
    # Only the call itself tells a setting that was chosen from one that has its default.
    made: Any = cls
    init: Callable[..., None] = made.__init__
    names = [f.name for f in fields(cls)]

    @wraps(init)
    def remembering(self: Any, *args: Any, **settings: Any) -> None:
        object.__setattr__(self, "given", frozenset((*names[: len(args)], *settings)))
        init(self, *args, **settings)

    made.__init__ = remembering
    return cls


@_remembers_given
@dataclass(frozen=True)
class PackingPolicy:
    """How sources become packs.

    Args:
        capacity: most tokens a pack may hold, alignment included.
        algorithm: name of a registered packer, see :mod:`lightning_pack.binning`; ``"auto"`` is ``"exact_fill"`` or
            ``"minimum_bin_slack"``, whichever packs the first sources of the data better (see :meth:`settled`).
        buffer_size: candidates that one loader worker holds to choose from, in sources.
        carry_over: whether the sources of under-filled packs stay in the buffer; else the whole buffer is packed and emitted
            each time, as Energon does.
        age_limit: turnovers of the buffer after which a source that stayed is packed first; none is emitted after more than 1.5
            times as many. None means 4.
        multiple: every source is padded to a multiple of this, in tokens (see :class:`~lightning_pack.ParallelLayout`).
        width: ``"variable"`` rows are as wide as their sources need; ``"fixed"`` rows are ``capacity`` wide; a number of tokens
            fixes another width. None means ``"variable"``.
        overlength: what happens to a source longer than ``capacity``: ``"drop"`` leaves it out and reports it, ``"truncate"``
            cuts its end off and reports the cut, ``"split"`` makes several sources of a plain text (a piece starts with the
            last token of the piece before as context, so every token stays a target once), ``"error"`` stops the run.
        max_sources: most sources in a pack.
        fixed_boundaries: rows carry ``max_sources`` boundaries and one for each of their packs, however many sources they
            have: the last offset is repeated. With a fixed width every tensor of a row has the same shape each time, which
            CUDA graphs and compilers need. Needs both.
        min_bins: least number of packs that the whole buffer becomes; without carry-over.
        bins_multiple_of: the whole buffer becomes a multiple of so many packs; without carry-over.
        delta: packs that ``"balanced_greedy_knapsack"`` opens beyond the least number.
        balance: ``"quadratic"`` lets all loader workers, on all ranks, emit packs of about the same sum of squared lengths in
            the same step, without communication. Attention costs as much.
        window: packs that each loader worker holds to that end. None means 64.
        max_media_tokens: most placeholders of images and the like in a pack; a source with more is left out as
            ``media_budget``, or ends the run under ``overlength="error"``. This and the next three need an encoder with media.
        max_media_bytes: most bytes of the tensors that a pack's media become, such as pixels.
        buffer_media_tokens: the buffer takes no further source once it holds so many placeholders, whatever ``buffer_size`` is.
        buffer_media_bytes: the same for the bytes of media that wait in it, encoded as they are in the data.
        seed: of the order in which the packs that leave a buffer together are emitted. The longest-first packers would
            otherwise end with the short sources each time. ``"concatenative"`` keeps the order of arrival and refuses a seed.

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
    algorithm: str = "auto"
    buffer_size: int = 256
    carry_over: bool = True
    age_limit: float | None = None
    multiple: int = 1
    width: Literal["variable", "fixed"] | int | None = "variable"
    overlength: Overlength = "drop"
    max_sources: int | None = None
    fixed_boundaries: bool = False
    min_bins: int | None = None
    bins_multiple_of: int = 1
    delta: int = 0
    balance: Balance | None = None
    window: int | None = None
    max_media_tokens: int | None = None
    max_media_bytes: int | None = None
    buffer_media_tokens: int | None = None
    buffer_media_bytes: int | None = None
    seed: int = 0
    #: Names of the settings that were given when it was made, also where a value is the default. No part of what is compared.
    given: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if self.width is None:
            object.__setattr__(self, "width", "variable")
        check_settings(self)

    def _repr_html_(self) -> str:
        return policy_html(self)

    @property
    def packer(self) -> str:
        """Name of the packer; ``"auto"`` that is not :meth:`settled` yet packs with ``"minimum_bin_slack"``."""
        return AUTO[1] if self.algorithm == "auto" else self.algorithm

    @property
    def packer_settings(self) -> dict[str, int]:
        """Options of the packer: those that are set, and its seed."""
        options = {name: value for name in ("max_sources", "delta") if (value := getattr(self, name))}
        return options | ({"seed": self.seed} if "seed" in binning.packer_options(self.packer) else {})

    @property
    def window_size(self) -> int:
        """Packs that a loader worker holds to choose the next one from; 1 without balance."""
        return 1 if self.balance is None else self.window or 64

    @property
    def window_tokens(self) -> int:
        """Bound of the tokens in the packs that a loader worker holds to balance them: a window, and the one that leaves."""
        return 0 if self.balance is None else (self.window_size + 1) * self.capacity

    @property
    def media_budget(self) -> MediaBudget:
        """Limits on the media of a pack."""
        return MediaBudget(tokens=self.max_media_tokens, nbytes=self.max_media_bytes)

    @property
    def row_width(self) -> int | None:
        """Physical width of every row in tokens, None where rows are as wide as their sources need."""
        if self.width == "fixed":
            return self.capacity
        return self.width if isinstance(self.width, int) else None

    def aligned(self, length: int) -> int:
        """Tokens that a source of ``length`` takes up in a row."""
        return -(-length // self.multiple) * self.multiple

    def pack(self, lengths: Sequence[int]) -> Groups:
        """Groups of indices into ``lengths``: each index once, each group within ``capacity`` after alignment.

        Raises:
            ValueError: for a source without tokens.
            OverlengthError: for a source that fits in no row.
        """
        aligned = self._all_aligned(lengths)
        return binning.with_bin_count(
            self._pack(aligned),
            aligned,
            min_bins=self.min_bins,
            bins_multiple_of=self.bins_multiple_of,
            max_sources=self.max_sources,
        )

    def _pack(self, aligned: Sequence[int]) -> Groups:
        return binning.pack(aligned, self.capacity, algorithm=self.packer, **self.packer_settings)

    def _all_aligned(self, lengths: Sequence[int]) -> list[int]:
        aligned = []
        for index, length in enumerate(lengths):
            if length < 1:
                raise ValueError(f"source {index} has {length} tokens; a source without tokens cannot be packed")
            if length > self.capacity:
                raise too_long(f"source {index}", length, capacity=self.capacity)
            aligned.append(self.aligned(int(length)))
        return aligned

    def choose(
        self,
        lengths: Sequence[int],
        *,
        ages: Sequence[int] | None = None,
        keys: Sequence[Hashable] | None = None,
        media: Sequence[tuple[int, int]] | None = None,
        final: bool = False,
    ) -> Groups:
        """Groups of indices into ``lengths`` that leave the buffer now; all of them without carry-over, or where ``final``.

        Args:
            lengths: real tokens of the sources in the buffer, in order of arrival.
            ages: sources read since each was; None means all are new.
            keys: sources with different keys do not share a pack.
            media: placeholders and bytes of the media of each source, each within the budget of a pack; None means none.
            final: whether no more sources come.

        Raises:
            ValueError: for a source without tokens, and for ages, keys or media that are not one for each source.
            OverlengthError: for a source that fits in no row.
        """
        aligned = self._all_aligned(lengths)
        for name, each in (("ages", ages), ("keys", keys), ("media", media)):
            if each is not None and len(each) != len(aligned):
                raise ValueError(f"{name} of {len(each)} sources were given with lengths of {len(aligned)}: one each is needed")
        if not aligned:
            return []
        none, limit = [0] * len(aligned), self.age_limit or DEFAULT_AGE_LIMIT
        buffer = Candidates(
            lengths=aligned,
            ages=none if ages is None else ages,
            keys=none if keys is None else keys,
            old=self.buffer_size * limit,
            # The buffer may turn over once before the next choice.
            overdue=self.buffer_size * min(1.25 * limit, 1.5 * limit - 1),
            capacity=self.capacity,
            max_sources=self.max_sources,
        )
        groups = self._groups(buffer, final=final)
        if media is None or not self.media_budget.limits:
            return groups
        return within_budget(
            groups,
            budget=self.media_budget,
            costs=media,
            must_leave=[final or not self.carry_over or age >= buffer.old for age in buffer.ages],
            in_order=self.packer == "concatenative",
        )

    def _groups(self, buffer: Candidates, *, final: bool) -> Groups:
        if not self.carry_over:
            return self._whole(buffer, final=final)
        if self.packer == "exact_fill":
            return exact_fill(buffer, final=final)
        rule = closed_rows if self.packer == "concatenative" else fullest_half
        return rule(buffer, self._pack, final=final)

    def _whole(self, buffer: Candidates, *, final: bool) -> Groups:
        kinds = buffer.by_key(range(len(buffer.lengths)))
        if (self.min_bins, self.bins_multiple_of) != (None, 1):
            if len(kinds) > 1:
                raise ValueError(
                    f"min_bins={self.min_bins} and bins_multiple_of={self.bins_multiple_of} move sources between packs, which "
                    f"sources with {len(kinds)} different group keys do not allow: leave out the one or the other"
                )
            try:
                return self.pack(buffer.lengths)
            except ValueError:
                # The last buffer of a finite stream may hold fewer sources than packs are asked for.
                if not final:
                    raise
        groups = []
        for apart in kinds:
            groups += [[apart[i] for i in group] for group in self._pack([buffer.lengths[i] for i in apart])]
        return groups

    def settled(
        self,
        lengths: Sequence[int],
        *,
        keys: Sequence[Hashable] | None = None,
        media: Sequence[MediaCost] | None = None,
    ) -> PackingPolicy:
        """This policy with ``"auto"`` replaced by the algorithm that packs a stream of these real lengths in fewer packs.

        Deterministic: the same lengths give the same choice. Other policies are returned as they are. Sources with different
        ``keys`` do not share a pack, and ``media`` count against the limits of packs and buffers.
        """
        if self.algorithm != "auto":
            return self
        from lightning_pack.simulation import simulate

        # Several times over, so that what waits at the end matters little.
        times = min(-(-DRY_RUN_SOURCES // max(len(lengths), 1)), 8)
        lengths, keys = [*lengths] * times, None if keys is None else [*keys] * times
        media = None if media is None else [*media] * times
        choices = [replace(self, algorithm=name) for name in AUTO]
        return min(choices, key=lambda choice: simulate(choice, lengths, keys=keys, media=media).packs)

    def layout(self, lengths: Sequence[int]) -> RowLayout:
        """Boundaries of the row that holds sources of these real lengths, in this order.

        Raises:
            ValueError: for no sources, a source without tokens, or sources that do not fit the row.
        """
        fixed = self.max_sources if self.fixed_boundaries else None
        layout = RowLayout.of(lengths, multiple=self.multiple, width=self.row_width, fixed_sources=fixed)
        if sum(map(self.aligned, lengths)) > self.capacity:
            raise ValueError(
                f"sources of {list(lengths)} tokens padded to multiples of {self.multiple} need "
                f"{sum(map(self.aligned, lengths))} tokens, more than capacity={self.capacity}"
            )
        return layout

    def admit(self, source: EncodedSource, *, needs_targets: bool = True) -> list[EncodedSource]:
        """What may enter the buffer in place of ``source``: itself, pieces of it, or the marker of its absence.

        Args:
            source: as it was encoded.
            needs_targets: whether one without a target is left out; predictions need none.

        Raises:
            OverlengthError: under ``overlength="error"``, for a source that fits in no row; under ``"truncate"`` and
                ``"split"`` for one with media, which is never cut.
        """
        return admitted(
            source, capacity=self.capacity, rule=self.overlength, budget=self.media_budget, needs_targets=needs_targets
        )

    def select(
        self,
        buffer: Sequence[EncodedSource],
        *,
        ages: Sequence[int] | None = None,
        final: bool = False,
        worker: int = 0,
        index: int = 0,
    ) -> list[list[EncodedSource]]:
        """Energon's first hook: groups of the very objects in ``buffer``, each at most once; the others stay (carry-over).

        Markers of left-out sources ride in the first group, so that they are reported as early as possible.

        Args:
            buffer: what the worker holds in order of arrival, markers of left-out sources included.
            ages: sources read since each of them was; None means all are new.
            final: whether no more sources come.
            worker: global number of the loader worker.
            index: how often this worker has selected before; with ``seed`` and ``worker`` it fixes the order of the groups.
        """
        usable = [i for i, source in enumerate(buffer) if len(source)]
        chosen = self.choose(
            [len(buffer[i]) for i in usable],
            ages=None if ages is None else [ages[i] for i in usable],
            keys=[buffer[i].group for i in usable],
            media=[(buffer[i].media_tokens, buffer[i].media_bytes) for i in usable],
            final=final,
        )
        groups = [[buffer[usable[i]] for i in group] for group in chosen]
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
            left_out=[gone for source in group for gone in source.news],
        )

    def fingerprint(self) -> dict[str, Any]:
        """Every setting as plain values; two policies with equal fingerprints pack the same stream the same way."""
        age_limit = (self.age_limit or DEFAULT_AGE_LIMIT) if self.carry_over else None
        return asdict(self) | {"age_limit": age_limit, "window": self.window_size}
