"""The kernel of torch on rows over context-parallel ranks: queries of a chunk, keys of all that came before."""

from __future__ import annotations

import pytest

from tests.gpu.checks import RESULTS, largest_error, results_over_ranks
from tests.gpu.device import DEVICE, DTYPE, TOLERANCES, backend_or_skip, skip_without_device

skip_without_device()
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize("backend", ["varlen", "segments"])
def test_a_kernel_aligns_queries_at_the_end_of_longer_keys(backend: str, context: int, window: int | None) -> None:
    results, reference = results_over_ranks(backend_or_skip(backend), context, device=DEVICE, dtype=DTYPE, window=window)
    for name, mine, exact in zip(RESULTS, results, reference, strict=True):
        assert float(exact.abs().max()) > 0.1, name
        assert largest_error([mine], [exact]) < TOLERANCES[DTYPE], name
