"""Run a function in several real processes that form a gloo group, each a rank for Lightning."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch


def on_ranks(function: str, argument: dict[str, Any], *, folder: Path, ranks: int = 2, timeout: float = 280) -> list[Any]:
    """What ``function`` (``"module:name"``, JSON in and out) returns on each rank, given ``argument``.

    The ranks are forks of one process that has imported the module: imports cost more than most runs.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    folder.mkdir(parents=True, exist_ok=True)
    results = [folder / f"rank{rank}.json" for rank in range(ranks)]
    command = [sys.executable, "-m", "tests.ranks", function, json.dumps(argument), *map(str, results)]
    with open(folder / "ranks.log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        code = process.wait(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert code == 0, f"exit code {code}\n{(folder / 'ranks.log').read_text()[-6000:]}"
    return [json.loads(result.read_text()) for result in results]


def _fork(ranks: int) -> int:
    """In each of so many children its rank; the parent waits for them and ends."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return rank
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    os._exit(any(codes))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    paths = sys.argv[3:]
    path = paths[_fork(len(paths))]
    result = function(json.loads(sys.argv[2]))
    Path(path).write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        # A process that ends with a live group may be aborted by it.
        torch.distributed.destroy_process_group()
    # The result is written. Threads of gloo that ask for the interpreter while it shuts down abort the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
