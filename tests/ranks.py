"""Run a function in several real processes that form a gloo group, each a rank for Lightning."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch


def on_ranks(function: str, argument: dict[str, Any], *, folder: Path, ranks: int = 2, timeout: float = 280) -> list[Any]:
    """What ``function`` (``"module:name"``, JSON in and out) returns on each rank, given ``argument``."""
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
    processes = []
    for rank in range(ranks):
        command = [sys.executable, "-m", "tests.ranks", function, json.dumps(argument), str(folder / f"rank{rank}.json")]
        with open(folder / f"rank{rank}.log", "w") as log:
            processes.append(
                subprocess.Popen(
                    command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=log, stderr=log
                )
            )
    try:
        codes = [process.wait(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(ranks))
    assert codes == [0] * ranks, f"exit codes {codes}\n{logs}"
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    module, _, name = sys.argv[1].partition(":")
    result = getattr(importlib.import_module(module), name)(json.loads(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        # A process that ends with a live group may be aborted by it.
        torch.distributed.destroy_process_group()
    # The result is written. Threads of gloo that ask for the interpreter while it shuts down abort the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
