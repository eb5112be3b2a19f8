"""Global random numbers while sources are encoded: a function of the stream, not of what else the process draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.energon import WorkerConfig


class StreamRandomness:
    """The states of Python's, numpy's and torch's global generators that a stream has for itself.

    Args:
        worker_config: of the logical worker; with the number of a buffer it gives the seeds.
    """

    def __init__(self, worker_config: WorkerConfig) -> None:
        self._worker_config = worker_config
        self._states: list[Any] | None = None

    @contextmanager
    def of_buffer(self, number: int | None) -> Iterator[None]:
        """Put them in place of the process's own: from the beginning of a buffer, or from where they were (None)."""
        outside = _states()
        if number is None:
            assert self._states is not None
            _set(self._states)
        else:
            words = np.random.SeedSequence([self._worker_config.worker_seed(), number]).generate_state(3)
            random.seed(int(words[0]))
            np.random.seed(int(words[1]))  # noqa: NPY002
            torch.random.default_generator.manual_seed(int(words[2]))
        try:
            yield
        finally:
            self._states = _states()
            _set(outside)


def _states() -> list[Any]:
    return [random.getstate(), np.random.get_state(), torch.get_rng_state()]  # noqa: NPY002


def _set(states: list[Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])
