"""HeldInterrupt: Ctrl-C waits until weights and position belong together again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

_Handler = Callable[[int, FrameType | None], object]


class HeldInterrupt:
    """Holds back an interrupt from the keyboard (SIGINT) while an optimizer step is under way.

    Weights that are changed in part belong to no step, so an interrupt in their midst would leave no checkpoint. A second one
    is not held back: somebody cannot wait. Only the main thread of a process can hold signals; elsewhere nothing is done, and
    a handler that is not Python's to call, or ignores the signal, is left alone.
    """

    def __init__(self) -> None:
        self._handler: _Handler | None = None
        self._pressed = False

    def hold(self) -> None:
        """From now on note the first interrupt."""
        if self._handler is not None or threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._handler, self._pressed = handler, False
            signal.signal(signal.SIGINT, self._note)

    def release(self) -> None:
        """Let the noted interrupt happen here, and later ones when they come.

        Raises:
            KeyboardInterrupt: from the handler that was there before, if it raises one.
        """
        handler = self._handler
        self.drop()
        if handler is not None and self._pressed:
            handler(signal.SIGINT, None)

    def drop(self) -> None:
        """Put the former handler back, unless somebody has set another one since; a noted interrupt does not happen."""
        handler, self._handler = self._handler, None
        if handler is not None and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pressed and self._handler is not None:
            handler = self._handler
            self.drop()
            handler(number, frame)
        self._pressed = True
