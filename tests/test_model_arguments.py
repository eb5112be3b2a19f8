"""The padding mask of a row, and which models get it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pack import PackedBatch, PackingPolicy
from lightning_pack.model_arguments import takes_padding_mask
from lightning_pack.source import EncodedSource


def row(*, width: Any = "variable") -> PackedBatch:
    sources = [EncodedSource.of(str(n), torch.arange(n)) for n in (5, 3)]
    # Token 0 is a real token as well as the pad: the mask goes by places, not by ids.
    return PackedBatch.from_packs([PackingPolicy(capacity=16, multiple=4, width=width).build(sources)], pad_id=0)


class Router(nn.Module):
    """A mixture of experts that counts the tokens for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Embedding(8, 2)

    def forward(self, input_ids: Tensor, padding_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        chosen = self.gate(input_ids).argmax(-1)
        return chosen.flatten().bincount(None if padding_mask is None else (~padding_mask).flatten().double(), minlength=2)


class Other(Router):
    def forward(self, input_ids: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        assert "padding_mask" not in kwargs
        return self.gate(input_ids)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        return self.module(*inputs, **kwargs)


def test_pads_of_alignment_and_of_the_tail_are_marked() -> None:
    assert row().padding_mask().int().tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1]]
    fixed = row(width="fixed").padding_mask()
    assert (fixed.dtype, fixed.shape) == (torch.bool, (1, 16))
    assert fixed.int().tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]]


def test_a_router_with_the_mask_counts_real_tokens_only() -> None:
    batch, model = row(), Router()
    assert model(**batch).sum() == 12
    assert model(**batch.model_inputs(model)).sum() == 8
    assert Wrapper(model)(**batch.model_inputs(Wrapper(model))).sum() == 8


def test_models_that_do_not_name_it_do_not_get_it() -> None:
    batch, other = row(), Other()
    assert "padding_mask" not in batch.model_inputs()
    assert other(**batch.model_inputs(other)).shape == (1, 12, 2)
    assert [takes_padding_mask(m) for m in (Router(), Other(), Wrapper(Router()), Wrapper(Other()))] == [True, False] * 2


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_model_is_asked_for_its_own_arguments() -> None:
    compiled = [torch.compile(model) for model in (Router(), Other())]
    assert all(hasattr(model, "_orig_mod") for model in compiled)
    assert [takes_padding_mask(model) for model in compiled] == [True, False]
