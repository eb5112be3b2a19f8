"""LoaderSlot: the place of a training loader that is perhaps not made yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_pack.collated.loader import PackLoader
from lightning_pack.tracked import TrainedRow


class LoaderSlot:
    """The training loader of a fit, which a hook may give only after a checkpoint was restored."""

    def __init__(self) -> None:
        self.loader: PackLoader | None = None
        self._pending: Mapping[str, Any] | None = None
        self._before: Callable[[], None] = lambda: None

    @property
    def before_fetch(self) -> Callable[[], None]:
        """Called before a row is fetched."""
        return self._before

    @before_fetch.setter
    def before_fetch(self, call: Callable[[], None]) -> None:
        self._before = call
        if self.loader is not None:
            self.loader.before_fetch = call

    def put(self, loader: PackLoader, *, state: Mapping[str, Any] | None) -> None:
        """From now on this is the loader, at a state or at its beginning."""
        self.loader = loader
        loader.tracked, loader.before_fetch = True, self._before
        loader.restore(state)

    @property
    def finished(self) -> bool:
        """Whether the last pass is trained on to its end."""
        return self.loader is not None and self.loader.finished

    def trained(self) -> TrainedRow:
        """Count the oldest fetched row as trained."""
        assert self.loader is not None
        return self.loader.trained()

    def commit(self) -> None:
        """An optimizer step is complete."""
        if self.loader is not None:
            self.loader.commit()

    def state(self) -> Any:
        """Where training stands."""
        return self._pending if self.loader is None else self.loader.state()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go to a state, now or when there is a loader."""
        self._pending = state
        if self.loader is not None:
            self.loader.restore(state)

    def stop(self) -> None:
        """End the reading."""
        if self.loader is not None:
            self.loader.stop()
            self.let_go()

    def let_go(self) -> None:
        """From now on each iteration of the loader is a pass of its own; the position of the training stays."""
        if self.loader is not None:
            self.loader.tracked = False
