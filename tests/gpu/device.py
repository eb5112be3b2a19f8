"""Where the checks run, and with which backends."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch import Tensor

from lightning_pack.attention import Backend, BackendError, SegmentsBackend, TransformerEngineBackend, VarlenBackend

DEVICE = torch.device(os.environ.get("LIGHTNING_PACK_TEST_DEVICE", "cuda"))
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
#: How far results may be from the reference, relative to the largest number of it: kernels round to their dtype in between.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4, torch.float64: 1e-10}
BACKENDS = {"varlen": VarlenBackend, "te": TransformerEngineBackend, "segments": SegmentsBackend}
#: Those that need a CUDA device.
KERNELS = ("varlen", "te")

on_cuda_only = pytest.mark.skipif(DEVICE.type != "cuda", reason="only a CUDA device shows it")


def skip_without_device() -> None:
    """One line for a whole file."""
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device", allow_module_level=True)


def backend_or_skip(name: str) -> Backend:
    """The backend, where it is installed and can run on :data:`DEVICE`."""
    if name in KERNELS and DEVICE.type != "cuda":
        pytest.skip(f"{name} runs on CUDA devices")
    try:
        # What a package warns of when it is imported is no fault of the backend.
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            return BACKENDS[name]()
    except BackendError as e:
        # A broken installation is not skipped: nothing would be known of a backend that is meant to be there.
        if name == "te" and "is not installed" in str(e):
            pytest.skip(str(e))
        raise


def poison(device: torch.device) -> None:
    """Fill the memory that will be given out next with bits that are NaN in every floating dtype.

    The allocator keeps small tensors (up to 1 MiB) and large ones in pools of their own.
    """
    if device.type != "cuda":
        return
    filled: list[Tensor] = [torch.full((1 << 28,), -1, dtype=torch.int8, device=device)]
    filled += [torch.full((1 << 19,), -1, dtype=torch.int8, device=device) for _ in range(256)]
    assert bool(filled[0][: 1 << 20].view(torch.bfloat16).isnan().all())
    assert bool(filled[-1].view(torch.float32).isnan().all())
    del filled
