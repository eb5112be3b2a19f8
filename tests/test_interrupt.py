from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from lightning_pack.energon.stage import PackingStage
from lightning_pack.energon.worker import Whereabouts, WorkerProcess
from lightning_pack.interrupt import HeldInterrupt


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """Interrupts that reached the handler which was there before."""
    calls: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        calls.append(number)

    former = signal.signal(signal.SIGINT, handler)
    yield calls
    signal.signal(signal.SIGINT, former)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_and_comes_once(seen: list[int]) -> None:
    held = HeldInterrupt()
    held.hold()
    press()
    assert seen == []
    held.hold()  # of the next optimizer in the same batch
    held.release()
    assert seen == [signal.SIGINT]
    held.release()
    press()
    assert seen == [signal.SIGINT] * 2, "nothing is held after the release"


def test_what_nobody_pressed_does_not_happen(seen: list[int]) -> None:
    held = HeldInterrupt()
    for _ in range(2):
        held.hold()
        held.release()
    assert seen == []


def test_an_interrupt_is_raised_where_it_is_released() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    held = HeldInterrupt()
    held.hold()
    press()
    with pytest.raises(KeyboardInterrupt):
        held.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait(seen: list[int]) -> None:
    held = HeldInterrupt()
    held.hold()
    press()
    assert seen == []
    press()
    assert seen == [signal.SIGINT]
    held.release()
    assert seen == [signal.SIGINT], "both were one wish to stop"


def test_a_run_that_has_failed_puts_the_handler_back_and_is_not_interrupted_as_well(seen: list[int]) -> None:
    held, before = HeldInterrupt(), signal.getsignal(signal.SIGINT)
    held.hold()
    press()
    held.drop()
    held.release()
    assert (seen, signal.getsignal(signal.SIGINT)) == ([], before)


def test_handlers_of_others_stay(seen: list[int]) -> None:
    held = HeldInterrupt()
    held.hold()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as Lightning does when it shuts down
    held.drop()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    held.hold()
    press()
    held.release()
    assert (seen, signal.getsignal(signal.SIGINT)) == ([], signal.SIG_IGN)


def test_other_threads_hold_nothing(seen: list[int]) -> None:
    held = HeldInterrupt()
    thread = threading.Thread(target=held.hold)
    thread.start()
    thread.join()
    press()
    assert seen == [signal.SIGINT]


def test_ctrl_c_right_after_a_worker_is_forked_does_not_end_it() -> None:
    interrupted = multiprocessing.get_context("fork").RawValue(ctypes.c_int, 0)
    armed = True

    def press_once() -> None:
        if armed:
            interrupted.value += 1
            press()

    def open_share(whereabouts: Whereabouts) -> PackingStage:
        raise ValueError("the share is opened")

    os.register_at_fork(after_in_child=press_once)
    worker = WorkerProcess(open_share, number=0, origin=None, timeout=60)
    armed = False
    try:
        with pytest.raises(ValueError, match="the share is opened"):
            worker.receive()
    finally:
        worker.close()
    assert interrupted.value == 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
