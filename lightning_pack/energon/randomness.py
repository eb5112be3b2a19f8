"""Global random numbers while sources are encoded: a function of the sample, not of what else the process draws.

So an encoder may use the global generators of Python, numpy and torch, and a source that is read again by its key, long after
it was read first, is the same source.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_WORD = 1 << 32


@contextmanager
def put_back() -> Iterator[None]:
    """The process gets its own states back afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def seed_for(sample: int, *, seed: int) -> None:
    """Seed the generators for the sample of that number in a stream with that seed."""
    # Far apart for any two samples of any two workers: their seeds are hashes of the worker already.
    mixed = (seed * 0x9E3779B97F4A7C15 + sample * 0xD1B54A32D192ED03) % (1 << 64)
    random.seed(mixed)
    np.random.seed(mixed % _WORD)  # noqa: NPY002
    torch.random.default_generator.manual_seed(mixed)


def number_of(restore_key: tuple[Any, ...]) -> int:
    """The number that a :class:`~lightning_pack.energon.reading.Reading` gave to a sample, from its key."""
    return restore_key[1] if len(restore_key) > 1 and restore_key[0] == "Reading" else 0
