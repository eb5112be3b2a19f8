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
    command = [sys.executable, "-m", "tests.ranks", function, json.dumps(argument), str(folder), str(ranks)]
    with open(folder / "imports.log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        process.wait(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    logs = "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("*.log")))
    assert process.returncode == 0, f"the ranks did not start\n{logs}"
    codes = json.loads((folder / "codes.json").read_text())
    assert codes == [0] * ranks, f"exit codes {codes}\n{logs}"
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def _fork(ranks: int, folder: Path) -> int:
    """In each of so many children its rank; the parent waits for them, writes down how they ended, and ends."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(log, stream)
            return rank
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (folder / "codes.json").write_text(json.dumps(codes))
    os._exit(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    folder = Path(sys.argv[3])
    rank = _fork(int(sys.argv[4]), folder)
    result = function(json.loads(sys.argv[2]))
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        # A process that ends with a live group may be aborted by it.
        torch.distributed.destroy_process_group()
    # The result is written. Threads of gloo that ask for the interpreter while it shuts down abort the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
