"""The same work on several processes: tasks in any order, each done once, with progress."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from lightning_pack.prepare.progress import progress_bar

_Task = TypeVar("_Task")
_work: Callable[[Any], Any]


def run_tasks(title: str, work: Callable[[_Task], Any], tasks: Sequence[_Task], *, workers: int, progress: bool) -> None:
    """Do each task once.

    Args:
        title: for the progress bar.
        work: what is done with a task; need not be picklable, as the processes are forks of this one.
        tasks: picklable.
        workers: processes; 0 works in this one.
        progress: show a progress bar where stderr is a terminal.

    Raises:
        ValueError: if a process dies.
        Exception: whatever the work raises; other tasks are then not begun.
    """
    with progress_bar(title, total=len(tasks), shown=progress) as advance:
        if not workers:
            for task in tasks:
                work(task)
                advance(1)
            return
        context = multiprocessing.get_context("fork")
        # An event has locks, which a process that dies may hold.
        stop = context.RawValue(ctypes.c_bool, False)
        pool = ProcessPoolExecutor(
            min(workers, max(len(tasks), 1)),
            mp_context=context,
            initializer=_begin,
            initargs=(work, os.getpid(), stop),
        )
        try:
            for done in as_completed([pool.submit(_do, task) for task in tasks]):
                done.result()
                advance(1)
        except BrokenProcessPool as e:
            stop.value = True
            raise ValueError(
                f"{title}: a process died. A machine that runs out of memory kills in this way: use fewer workers. The same "
                "command goes on where this one stopped"
            ) from e
        except BaseException:
            # A task may take minutes, and what it has not finished is begun again anyway.
            stop.value = True
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(work: Callable[[Any], Any], parent: int, stop: Any) -> None:
    global _work
    _work = work
    # Ctrl-C goes to every process of a terminal; ending the run is the business of the parent alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Where the parent is killed nobody would end this process, and two would write the same file.
    _end_with(parent, stop)
    torch.set_num_threads(1)


def _do(task: Any) -> None:
    _work(task)


def _end_with(parent: int, stop: Any) -> None:
    def watch() -> None:
        while os.getppid() == parent and not stop.value:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
