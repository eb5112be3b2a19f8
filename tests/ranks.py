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


def on_ranks(
    function: str, argument: dict[str, Any], *, folder: Path, ranks: int = 2, timeout: float = 280, forked: bool = False
) -> list[Any]:
    """What ``function`` (``"module:name"``, JSON in and out) returns on each rank, given ``argument``.

    ``forked``: the ranks are forks of one process that has imported the module, which spares the imports of the others.
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
    results = [str(folder / f"rank{rank}.json") for rank in range(ranks)]
    processes = []
    for rank in range(1 if forked else ranks):
        command = [sys.executable, "-m", "tests.ranks", function, json.dumps(argument)]
        command += results if forked else [results[rank]]
        with open(folder / f"rank{rank}.log", "w") as log:
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=log,
                    start_new_session=forked,
                )
            )
    try:
        codes = [process.wait(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            if forked and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
    logs = "\n".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(len(processes)))
    assert codes == [0] * len(processes), f"exit codes {codes}\n{logs}"
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


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
    path = paths[_fork(len(paths)) if len(paths) > 1 else 0]
    result = function(json.loads(sys.argv[2]))
    Path(path).write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        # A process that ends with a live group may be aborted by it.
        torch.distributed.destroy_process_group()
    # The result is written. Threads of gloo that ask for the interpreter while it shuts down abort the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
