"""The sources of several batches that wait for a pack, and where their loader stands: the position of a PackLoader."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from lightning_pack.policy import PackingPolicy
from lightning_pack.source import EncodedSource, LeftOut, Pack


@dataclass(frozen=True, kw_only=True)
class LoaderPosition:
    """Where the reading of a pass stands, without a token.

    Args:
        epoch: passes that are complete.
        loader: state of the wrapped loader before the batch ``first``; None where it has none, and before the first pass.
        first: number of the first batch that is read again.
        waiting: for each batch that is read again, which of its sources wait.
        digest: of the keys and lengths of the sources that wait.
        selected: selections made in this pass.
        emitted: packs of the next selection that were given already.
        begun: whether anything of this pass was read.
    """

    epoch: int = 0
    loader: Any = None
    first: int = 0
    waiting: tuple[tuple[int, ...], ...] = ()
    digest: str = ""
    selected: int = 0
    emitted: int = 0
    begun: bool = False

    def plain(self) -> dict[str, Any]:
        """As plain containers."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"waiting": [list(indices) for indices in self.waiting]}

    @classmethod
    def of(cls, plain: Any) -> LoaderPosition:
        """From :meth:`plain`.

        Raises:
            ValueError: if it is none.
        """
        kinds: dict[str, type] = {f.name: type(f.default) for f in fields(cls)} | {"waiting": list}
        if type(plain) is not dict or set(plain) != set(kinds):
            raise ValueError(f"a position in a loader should hold {', '.join(sorted(kinds))}")
        for name, kind in kinds.items():
            value = plain[name]
            if name != "loader" and (type(value) is not kind or (type(value) is int and value < 0)):
                raise ValueError(f"{name} of a position in a loader is {value!r:.80}")
        rows = plain["waiting"]
        if not all(type(row) is list and all(type(i) is int and i >= 0 for i in row) for row in rows):
            raise ValueError("waiting of a position in a loader should hold lists of numbers")
        return cls(**plain | {"waiting": tuple(map(tuple, rows))})


class _Waiting(NamedTuple):
    source: EncodedSource
    #: Its batch, and its place among what that batch gave.
    batch: int
    place: int
    #: Share of its batch: those of a whole batch add up to 1.
    share: float


class WindowedPacks:
    """Packs from batches, a window of which is chosen from. Sources wait over the choices as the policy says.

    Args:
        batches: the rest of a pass, from the batch that the position names.
        sources: a batch and its number -> its sources.
        snapshot: the state of the wrapped loader at this moment.
        policy: with ``buffer_size`` and ages in batches.
        position: to begin at.
        settle: chooses the algorithm by the lengths of the first window, where the policy has ``"auto"``.
        needs_targets: whether sources without a target are left out.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        sources: Callable[[Any, int], list[EncodedSource]],
        snapshot: Callable[[], Any],
        policy: PackingPolicy,
        position: LoaderPosition,
        settle: Callable[[list[int]], str],
        needs_targets: bool = True,
    ) -> None:
        self._batches: Iterator[Any] = iter(batches)
        self._sources, self._snapshot = sources, snapshot
        self._policy, self._settle, self._needs_targets = policy, settle, needs_targets
        self._position = position
        #: Number and loader state before each batch that may be read again.
        self._before: deque[tuple[int, Any]] = deque()
        self._buffer: list[_Waiting] = []
        self._next, self._ended = position.first, False
        self._state = position.loader
        #: Left out and not told yet.
        self.news: list[LeftOut] = []

    def packs(self) -> Iterator[tuple[Pack, LoaderPosition]]:
        """Each pack, with the position after it.

        Raises:
            ValueError: if the sources that are read again are not those that waited.
        """
        self._read_again()
        selected, emitted = self._position.selected, self._position.emitted
        while True:
            self._fill()
            if not self._buffer:
                return
            final = self._ended
            sources = [waiting.source for waiting in self._buffer]
            if self._policy.algorithm == "auto":
                self._policy = replace(self._policy, algorithm=self._settle([len(source) for source in sources]))
            place = {id(source): i for i, source in enumerate(sources)}
            ages = [self._next - 1 - waiting.batch for waiting in self._buffer]
            # The same order on all ranks: some of them may share their rows.
            groups = self._policy.select(sources, ages=ages, final=final, index=selected)
            chosen = [[place[id(source)] for source in group] for group in groups]
            kept = set(range(len(sources))).difference(*chosen)
            for number in range(emitted, len(groups)):
                pack = self._policy.build(groups[number])
                pack.ages = [ages[i] for i in chosen[number]]
                pack.left_out = [*self.news, *pack.left_out]
                self.news = []
                if number == len(groups) - 1:
                    self._buffer = [self._buffer[i] for i in sorted(kept)]
                    yield pack, self._at(selected + 1, 0)
                else:
                    yield pack, self._at(selected, number + 1)
            selected, emitted = selected + 1, 0

    def _read_again(self) -> None:
        for indices in self._position.waiting:
            found = self._read(again=True)
            if found is None or any(i >= len(found) for i in indices):
                raise self._changed()
            self._buffer += [found[i] for i in indices]
        if self._position.digest and _digest(self._buffer) != self._position.digest:
            raise self._changed()

    def _changed(self) -> ValueError:
        return ValueError(
            f"batches {self._position.first} to {self._position.first + len(self._position.waiting) - 1} are not those that "
            "were read before the checkpoint was saved: data, collator or sampler have changed. Set them back, or start over "
            "with pack_loader(..., on_mismatch='restart')"
        )

    def _fill(self) -> None:
        # As long as a whole batch has room in the window.
        while not self._ended and sum(waiting.share for waiting in self._buffer) + 1 <= self._policy.buffer_size + 1e-6:
            self._buffer += self._read() or []

    def _read(self, *, again: bool = False) -> list[_Waiting] | None:
        """What a batch gives; None after the last."""
        state, number = self._state, self._next
        batch = next(self._batches, None)
        self._state = self._snapshot()
        if batch is None:
            self._ended = True
            return None
        self._next += 1
        self._before.append((number, state))
        usable: list[EncodedSource] = []
        for source in self._sources(batch, number):
            for piece in self._policy.admit(source, needs_targets=self._needs_targets):
                if len(piece):
                    usable.append(piece)
                elif piece.left_out is not None and not again:
                    self.news.append(piece.left_out)
        return [_Waiting(source, number, place, 1 / len(usable)) for place, source in enumerate(usable)]

    def _at(self, selected: int, emitted: int) -> LoaderPosition:
        first = self._buffer[0].batch if self._buffer else self._next
        while self._before and self._before[0][0] < first:
            self._before.popleft()
        waiting: list[list[int]] = [[] for _ in range(first, self._next)]
        for each in self._buffer:
            waiting[each.batch - first].append(each.place)
        return LoaderPosition(
            epoch=self._position.epoch,
            loader=self._before[0][1] if self._before else self._state,
            first=first,
            waiting=tuple(map(tuple, waiting)),
            digest=_digest(self._buffer),
            selected=selected,
            emitted=emitted,
            begun=True,
        )


def _digest(buffer: Sequence[_Waiting]) -> str:
    told = repr([(waiting.source.key, len(waiting.source)) for waiting in buffer])
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def plain_copy(value: Any, *, where: str) -> Any:
    """A deep copy of the state of a loader, of such values as a checkpoint can hold.

    Raises:
        TypeError: naming the first value that it cannot.
    """
    if value is None or type(value) in (bool, int, float, str) or (type(value) is bytes and value):
        return value
    if type(value) is torch.Tensor:
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(plain_copy(item, where=where) for item in value)
    if type(value) is dict:
        return {key: plain_copy(item, where=f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"{where} is a {type(value).__qualname__}, which a checkpoint cannot hold")
