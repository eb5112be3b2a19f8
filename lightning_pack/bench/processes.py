"""Functions in processes of their own, so that no threads, caches or peaks of memory of one benchmark reach the next."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class BenchProcessError(RuntimeError):
    """A function that ran in a process of its own failed, or its process ended."""


def in_a_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What ``function`` returns in a new process, which may have child processes.

    Args:
        function: of a module, so that it can be found there; it gets ``args`` and ``kwargs``.
        *args: for the function; they and what it returns have to be picklable.
        **kwargs: for the function.

    Raises:
        BenchProcessError: if the function raises, whose traceback goes to stderr, or if the process ends before it returns.
    """
    context = _context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, args, kwargs))  # type: ignore[attr-defined]
    process.start()
    sender.close()
    try:
        succeeded, answer = receiver.recv()
    except EOFError:
        process.join()
        raise BenchProcessError(f"its process ended before it was done, {_ending(process.exitcode)}") from None
    except KeyboardInterrupt:
        process.terminate()
        raise
    finally:
        process.join()
        receiver.close()
    if not succeeded:
        raise BenchProcessError(answer)
    return answer


def _context() -> BaseContext:
    """New processes are copies of one that has imported everything and run nothing, where the system can do that."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_pack.bench.suite"])
    return context


def _ending(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"by {signal.Signals(-exitcode).name}"
    return f"with exit code {exitcode}"


def _send(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        answer = True, function(*args, **kwargs)
    except KeyboardInterrupt:
        return
    except Exception as error:
        traceback.print_exc()
        answer = False, f"{type(error).__name__}: {error}"
    sender.send(answer)
