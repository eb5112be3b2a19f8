from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.numbers_data import lengths, records_of, write_webdataset

# The models are tiny, and tests run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# Whoever starts tests in the background may have Ctrl-C ignored, in all that they start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, so that a failure is one for everybody; `--hypothesis-profile=explore` looks for new ones.
# However long they take: that depends on what else the machine does.
settings.register_profile("explore", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

#: What commands that run in this process change: benchmarks silence Lightning, and the command line leaves out its chatter.
LOGGERS = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "transformers")


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """So that no test hears less because of those before it."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.level, list(logger.filters)) for logger in loggers]
    yield
    for logger, (level, filters) in zip(loggers, before, strict=True):
        # None is set before its library is imported.
        if level:
            logger.setLevel(level)
        logger.filters[:] = filters


VECTORS = Path(__file__).parent / "vectors"


def sweep_seed() -> int:
    """Of the sample of ways to stop and resume."""
    return int(os.environ.get("SWEEP_SEED", "0"))


def pytest_report_header() -> str:
    return f"SWEEP_SEED={sweep_seed()}"


def vectors(name: str) -> dict[str, Any]:
    return json.loads((VECTORS / f"{name}.json").read_text())


def faulty_records(count: int = 200) -> list[Any]:
    """Records of long-tailed lengths, a few of which can never be trained on (capacity 64)."""
    records: list[Any] = records_of(lengths(count, most=80))
    records[7] = {"refuse": "corrupt"}
    records[11] = b"{bad json"
    records[13] = {"crash": True}
    records[15] = {"n": 0, "id": 15}
    records[17] = {"n": 9, "id": 17, "no_targets": True}
    records[19] = b"[1, 2]"
    records[23] = {"n": 500, "id": 23}
    return records


@pytest.fixture(scope="session")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Energon dataset of 200 training samples, some unusable, and 30 for validation."""
    parts = {"train": faulty_records(), "val": records_of(lengths(30, most=40, seed=1))}
    return write_webdataset(tmp_path_factory.mktemp("data") / "numbers", parts)
