"""Packs without images in data that has some: over two ranks, one of which has no image, against one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from transformers import AutoConfig

from lightning_pack import PackedAttention
from lightning_pack.callbacks.media_parameters import MediaParameters, media_parameters
from lightning_pack.pretrained import checkpoint_activations
from lightning_pack.source import IGNORE, EncodedSource
from tests.ranks import on_ranks
from tests.test_precision import Data, Packed
from tests.test_vision_encoder import record
from tests.test_vision_rows import alone, summed_loss, vision_row_of_one_pack
from tests.tiny_models import forward_inputs, gradients_of, quiet_trainer, tiny_model
from tests.tiny_vision import vision_encoder, vision_model

#: Images of each chat of each micro-batch, by rank and window of two.
IMAGES = (
    (((2,), (0, 0)), ((0,), (0,)), ((0, 1), (2,))),
    (((0,), (1, 2)), ((1,), (0, 2)), ((1,), (0,))),
)


def sources(family: str, rank: int) -> list[list[list[EncodedSource]]]:
    encoder, number = vision_encoder(family), iter(range(100 * rank, 1000))
    return [
        [[encoder(f"c{rank}.{i}", record(i, n)).completed() for n in m for i in [next(number)]] for m in window]
        for window in IMAGES[rank]
    ]


def start(case: Case) -> nn.Module:
    model = vision_model(case.family)
    if case.frozen:
        model.model.visual.requires_grad_(False)
    if case.checkpointing:
        checkpoint_activations(model)
    return model


class Whole(Packed):
    def _gradients(self) -> dict[str, Tensor]:
        return gradients_of(self.model)


class Sharded(Packed):
    def configure_model(self) -> None:
        decoder, visual = self.model.model.language_model, self.model.model.visual
        for part in (*decoder.layers, *visual.blocks, visual, self.model):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def _gradients(self) -> dict[str, Tensor]:
        assert all(isinstance(p, DTensor) for p in self.model.parameters())
        return {name: p.grad.full_tensor().clone() for name, p in self.model.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Case:
    family: str = "qwen3_vl"
    accumulate: int = 2
    frozen: bool = False
    checkpointing: bool = False
    sharded: bool = False


CASES = {
    "ddp, every micro-batch a step": Case("qwen2_5_vl", accumulate=1),
    "ddp": Case(checkpointing=True),
    "ddp, frozen": Case(frozen=True),
    "fully sharded": Case(sharded=True),
    "fully sharded, frozen": Case("qwen2_5_vl", frozen=True, sharded=True),
}


def fit(case: Case, rank: int) -> Packed:
    strategy = ModelParallelStrategy(2, 1) if case.sharded else DDPStrategy()
    module = (Sharded if case.sharded else Whole)(start(case))
    rows = [vision_row_of_one_pack(m) for window in sources(case.family, rank) for m in window]
    trainer = quiet_trainer(
        callbacks=[PackedAttention(monitor=False)],
        max_epochs=1,
        devices=2,
        strategy=strategy,
        accumulate_grad_batches=case.accumulate,
    )
    trainer.fit(module, datamodule=Data(rows))
    return module


def run_rank(argument: dict[str, Any]) -> list[str]:
    """Body of one rank: every case in turn, gradients saved."""
    rank, folder = int(os.environ["RANK"]), argument["folder"]
    for name, case in CASES.items():
        torch.save(fit(case, rank).raw, f"{folder}/{name}.{rank}.pt")
    return [bare(helped=helped) for helped in (True, False)]


def bare(*, helped: bool) -> str:
    """How two steps of DistributedDataParallel over rows without images end on both ranks."""
    model = start(Case())
    kept = MediaParameters(model, sharded=False) if helped else None
    wrapped = DistributedDataParallel(model)
    row = vision_row_of_one_pack([vision_encoder()("t", record(0, 0)).completed()])
    try:
        for _ in range(2):
            wrapped(**row).loss.backward()
    except RuntimeError as error:
        return str(error)
    finally:
        if kept is not None:
            kept.remove()
    return "two steps"


def one_process(case: Case) -> Iterator[dict[str, Tensor]]:
    """Gradients of each step, every chat alone and its images its own."""
    model = start(case)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ranks = [[m for window in sources(case.family, rank) for m in window] for rank in range(2)]
    for i in range(0, len(ranks[0]), case.accumulate):
        step = [source for rank in ranks for m in rank[i : i + case.accumulate] for source in m]
        targets = sum(int((source.labels != IGNORE).sum()) for source in step)
        optimizer.zero_grad()
        (torch.stack([summed_loss(alone(model, source), source) for source in step]).sum() / targets).backward()
        yield gradients_of(model)
        optimizer.step()


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    # In each way: the one or the other rank without an image where gradients are sent, and in a whole window.
    last = [[any(window[1]) for window in rank] for rank in IMAGES]
    assert list(zip(*last, strict=True)) == [(False, True), (False, True), (True, False)]
    assert not any(n for m in IMAGES[0][1] for n in m)
    ranks = on_ranks("tests.test_rows_without_images:run_rank", {"folder": str(tmp_path)}, folder=tmp_path / "ranks")
    for helped, bare in ranks:
        assert helped == "two steps"
        # Here both ranks have no image, so it is an error; if one has, they wait, or mistake one message for another.
        assert "Expected to have finished reduction in the prior iteration" in bare
    for name, case in CASES.items():
        expected = list(one_process(case))
        assert any(name.startswith("model.visual") for name in expected[0]) != case.frozen
        for rank in range(2):
            found = torch.load(tmp_path / f"{name}.{rank}.pt")
            assert len(found) == len(expected) == 6 // case.accumulate
            for step, gradients in enumerate(found):
                assert gradients.keys() == expected[step].keys(), name
                for parameter, gradient in gradients.items():
                    assert (gradient - expected[step][parameter]).abs().max() <= 1e-5, (name, step, parameter)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_digit_changes(checkpointing: bool) -> None:
    case = Case(checkpointing=checkpointing)
    texts = vision_row_of_one_pack([vision_encoder()(f"t{i}", record(i, 0)).completed() for i in range(2)])
    images = vision_row_of_one_pack([vision_encoder()(f"i{i}", record(i, i)).completed() for i in range(2)])
    found = []
    for sharded in (None, False, True):
        model = start(case)
        kept = None if sharded is None else MediaParameters(model, sharded=sharded)
        results = []
        for row in (texts, images):
            model.zero_grad()
            output = model(**row)
            output.loss.backward()
            results.append((output.logits, output.loss, gradients_of(model)))
        found.append(results)
        if kept is not None:
            kept.remove()
            # As it was.
            model.zero_grad()
            model(**texts).loss.backward()
            assert gradients_of(model).keys() == found[0][0][2].keys()
            assert not model._forward_hooks
            assert not model._forward_pre_hooks
            # transformers has one of its own where activations are recomputed.
            assert len(model.get_input_embeddings()._forward_hooks) == checkpointing
    plain, *helped = found
    media = {name for name, p in start(case).named_parameters() if name.startswith("model.visual")}
    assert len(media) == len(media_parameters(start(case))) == 39
    assert plain[0][2].keys().isdisjoint(media)
    for results in helped:
        for (logits, loss, gradients), (plain_logits, plain_loss, plain_gradients) in zip(results, plain, strict=True):
            assert torch.equal(logits, plain_logits)
            assert torch.equal(loss, plain_loss)
            assert all(torch.equal(gradients[name], value) for name, value in plain_gradients.items())
            assert gradients.keys() == plain_gradients.keys() | media
        assert not any(bool(results[0][2][name].any()) for name in media)


def test_nothing_is_done_where_nothing_is_trained() -> None:
    model = vision_model("qwen3_vl")
    model.model.visual.requires_grad_(False)
    kept = MediaParameters(model, sharded=False)
    row = vision_row_of_one_pack([vision_encoder()("t", record(0, 0)).completed()])
    output = model(**forward_inputs(row))
    assert "Uses" not in type(output.logits.grad_fn).__name__
    kept.remove()
    assert media_parameters(tiny_model("llama")) == []
    text = tiny_model("llama")
    MediaParameters(text, sharded=True)
    assert not text._forward_hooks
    assert not text._forward_pre_hooks
    with torch.no_grad():
        assert vision_model("qwen3_vl")(**forward_inputs(row)).logits.grad_fn is None


def test_images_that_are_not_known_are_refused_on_shards_only() -> None:
    model = vision_model("qwen3_vl")
    known = model.config.vision_config
    # Of a model whose images are not rows of patches.
    model.config.vision_config = AutoConfig.for_model("siglip_vision_model")
    row = vision_row_of_one_pack([vision_encoder()("t", record(0, 1)).completed()])
    text = vision_row_of_one_pack([vision_encoder()("t", record(0, 0)).completed()])
    kept = MediaParameters(model, sharded=True)
    model.config.vision_config = known
    assert model(**text).loss.isfinite()
    with pytest.raises(ValueError, match=r"Qwen3VL.* got images while its weights are sharded.*use DDPStrategy"):
        model(**row)
    kept.remove()
    assert model(**row).loss.isfinite()
