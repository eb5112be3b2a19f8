"""The kernel of torch on rows over context-parallel ranks: queries of a chunk, keys of all that came before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pack import ContextSlice, ParallelLayout
from lightning_pack.attention import ContextGroup, THDInputs, VarlenBackend
from tests.context_ranks import LENGTHS, row_of
from tests.gpu.device import DEVICE, on_cuda_only, skip_without_device
from tests.reference_attention import reference_attention

skip_without_device()
pytestmark = pytest.mark.gpu


@dataclass(frozen=True, eq=False)
class Together(ContextGroup):
    """A group whose ranks are this process, one after the other; it gathers what it is made with."""

    gathered: Any = None

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.gathered


@on_cuda_only
@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("window", [None, 5, 70])
def test_the_varlen_kernel_aligns_queries_at_the_end_of_longer_keys(context: int, window: int | None) -> None:
    layout, device = ParallelLayout(context=context), DEVICE
    row = row_of(LENGTHS, layout).to(device)
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "generator": generator}
    full = [torch.randn(row.width, heads, 64, **options) for heads in (4, 2, 2)]
    offsets = row.cu_seqlens_padded.tolist()
    expected = reference_attention(*(tensor.double().cpu() for tensor in full), offsets=offsets, scale=0.125, window=window)
    parts = [ContextSlice.of(row, layout=layout, rank=rank) for rank in range(context)]
    gathered = tuple(torch.cat([tensor[part.indices] for part in parts]) for tensor in full[1:])
    for rank, part in enumerate(parts):
        backend = VarlenBackend()
        backend.context = Together(rank=rank, ranks=tuple(range(context)), process_group=None, gathered=gathered)
        out = backend(*(tensor[part.indices] for tensor in full), inputs=THDInputs.of(part), scale=0.125, window=window)
        torch.testing.assert_close(out.double().cpu(), expected[part.indices.cpu()], rtol=0.02, atol=0.02)
