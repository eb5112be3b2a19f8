"""Strategies over two ranks of gloo against one process without packing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from lightning_pack import ParallelLayout, TokenNormalizer
from lightning_pack.attention import STRICT_ATTENTION, ActivatedModel, find_models, inspect_model
from lightning_pack.callbacks import PackedAttention, TokenNormalizedGradients
from lightning_pack.row import PackedBatch
from lightning_pack.source import IGNORE, EncodedSource
from tests.ranks import on_ranks
from tests.test_precision import CLIP, ROUNDOFF, Data, Descent, Packed, fit_unpacked, options_of, relative
from tests.tiny_models import make_sources, pack_row, quiet_trainer, tiny_model

#: What torch.compile imports.
SCRIPT = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

#: Sources of each micro-batch, by rank and window. Numbers of targets differ much; one micro-batch of rank 1 has none.
LENGTHS = (
    (((20, 24, 16), (5,)), ((4, 4), (30, 12))),
    (((9,), ()), ((3,), (28, 28))),
)


def micro_batches(rank: int) -> list[list[list[EncodedSource]]]:
    return [
        [
            make_sources(lengths or (7,), seed=100 * rank + 10 * w + m, prompt=2 if lengths else 7)
            for m, lengths in enumerate(window)
        ]
        for w, window in enumerate(LENGTHS[rank])
    ]


def windows(ranks: tuple[int, ...], accumulate: int) -> list[list[list[EncodedSource]]]:
    """Micro-batches by optimizer step; sources without targets stay out."""
    every = [[m for window in micro_batches(rank) for m in window] for rank in ranks]
    steps = [[m for rows in every for m in rows[i : i + accumulate]] for i in range(0, len(every[0]), accumulate)]
    return [[m for m in step if (m[0].labels != IGNORE).any()] for step in steps]


class Unused(Packed):
    """Has a parameter that no loss depends on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.spare = nn.Parameter(torch.ones(3))


class Sharded(Packed):
    def configure_model(self) -> None:
        for part in (*self.model.model.layers, self.model):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def _gradients(self) -> dict[str, Tensor]:
        assert all(isinstance(p.grad, DTensor) for p in self.model.parameters())
        return {name: p.grad.full_tensor().clone() for name, p in self.model.named_parameters()}


class Tensors(Packed):
    """Heads and intermediate size over both ranks."""

    def configure_model(self) -> None:
        across, down = ColwiseParallel(), RowwiseParallel()
        plan = {f"self_attn.{name}_proj": across for name in "qkv"} | {"self_attn.o_proj": down}
        plan |= {"mlp.gate_proj": across, "mlp.up_proj": across, "mlp.down_proj": down}
        for layer in self.model.model.layers:
            parallelize_module(layer, self.device_mesh["tensor_parallel"], plan)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        # Torch does not clip where some parameters are sharded and some are not.
        gradients = {name: p.grad for name, p in self.model.named_parameters()}
        assert {isinstance(gradient, DTensor) for gradient in gradients.values()} == {True, False}
        self.raw.append({n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in gradients.items()})

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None: ...


class Manual(Packed):
    """A loop of its own: two backward passes, two optimizers, clipping."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.automatic_optimization = False
        self.normalizer = TokenNormalizer(self)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> None:
        optimizers = self.optimizers()
        self.manual_backward(self.normalizer.scale(super().training_step(batch, batch_idx), batch))
        if batch_idx % 2 == 1:
            for optimizer in optimizers:
                self.normalizer.normalize(optimizer)
            self.raw.append(self._gradients())
            nn.utils.clip_grad_norm_(self.parameters(), CLIP)
            self.clipped.append(self._gradients())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [SGD(parameters[::2], lr=0.1), SGD(parameters[1::2], lr=0.1)]


@dataclass(frozen=True)
class Case:
    strategy: Callable[[], Any]
    kind: type[Descent] = Packed
    precision: str = "32-true"
    accumulate: int = 2
    #: Both ranks get the rows of rank 0.
    same_rows: bool = False


CASES = {
    "ddp": Case(DDPStrategy),
    "ddp, half precision": Case(DDPStrategy, precision="bf16-mixed"),
    "ddp, scaled": Case(DDPStrategy, precision="16-mixed"),
    # Torch has no static graph where the first backward pass is not synchronized.
    "ddp, static graph": Case(lambda: DDPStrategy(static_graph=True), accumulate=1),
    "ddp, unused parameter": Case(lambda: DDPStrategy(find_unused_parameters=True), Unused),
    "fully sharded": Case(lambda: ModelParallelStrategy(2, 1), Sharded),
    "fully sharded, half precision": Case(lambda: ModelParallelStrategy(2, 1), Sharded, "bf16-mixed"),
    "tensor parallel": Case(lambda: ModelParallelStrategy(1, 2), Tensors, same_rows=True),
    "manual": Case(DDPStrategy, Manual),
}


def run_rank(argument: dict[str, Any]) -> None:
    """Body of one rank: every case in turn, gradients saved."""
    rank, folder = int(os.environ["RANK"]), argument["folder"]
    for name, case in CASES.items():
        module = case.kind(tiny_model("llama"))
        rows = [pack_row(m, multiple=4) for window in micro_batches(0 if case.same_rows else rank) for m in window]
        manual = not module.automatic_optimization
        trainer = quiet_trainer(
            callbacks=[PackedAttention(monitor=False, token_normalization=not manual)],
            max_epochs=1,
            devices=2,
            strategy=case.strategy(),
            **({} if manual else {"accumulate_grad_batches": case.accumulate, "gradient_clip_val": CLIP}),
            **options_of(case.precision),
        )
        trainer.fit(module, datamodule=Data(rows))
        torch.save({"raw": module.raw, "clipped": module.clipped}, f"{folder}/{name}.{rank}.pt")
    torch.save(
        [unaveraged(module, context) for module in (Packed, Manual) for context in (1, 2)], f"{folder}/unaveraged.{rank}.pt"
    )
    torch.save({"raw": fully_sharded_by_hand(rank), "clipped": []}, f"{folder}/fsdp.{rank}.pt")


def unaveraged(kind: type[Packed], context: int) -> str:
    """The message of a run whose module shards its layers only, with two data-parallel ranks."""

    class Partly(kind):  # type: ignore[misc, valid-type]
        def configure_model(self) -> None:
            for part in self.model.model.layers:
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    module, data = Partly(tiny_model("llama")), Data([pack_row(micro_batches(0)[0][0], multiple=4)])
    data.parallel = ParallelLayout(context=context)  # type: ignore[attr-defined]
    callback = PackedAttention(monitor=False, token_normalization=kind is not Manual and context == 1)
    trainer = quiet_trainer(callbacks=[callback], max_epochs=1, devices=2, strategy=ModelParallelStrategy(2, 1))
    try:
        trainer.fit(module, datamodule=data)
    except ValueError as e:
        return str(e)
    return "not refused"


# --- FSDP of the first kind: the Trainer takes it on GPUs only, torch on CPUs too ----------------------------------------


def fully_sharded_by_hand(rank: int, pairs: DeviceMesh | None = None) -> list[dict[str, Tensor]]:
    """What Lightning's loop does under FSDPStrategy: its hooks, in their order. Sharded over all ranks, or inside ``pairs``."""
    model = tiny_model("llama")
    shapes = {name: p.shape for name, p in model.named_parameters()}
    # Attention layers inside wrapped layers, as deep as a policy may go.
    policy = ModuleWrapPolicy({LlamaDecoderLayer, LlamaAttention})
    sharding: dict[str, Any] = {"sharding_strategy": ShardingStrategy.FULL_SHARD}
    if pairs is not None:
        sharding = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": pairs}
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"), **sharding
    )
    assert sum(isinstance(part, FullyShardedDataParallel) for part in wrapped.modules()) == 5
    (found,) = find_models(nn.ModuleList([wrapped]))
    assert found is model
    assert inspect_model(found) == []
    layer = next(part for part in model.modules() if type(part) is LlamaDecoderLayer)
    assert type(layer.self_attn) is FullyShardedDataParallel
    assert "Losing.self_attn" in losses_of(model, layer)
    active = ActivatedModel.of(found)
    assert model.config._attn_implementation == STRICT_ATTENTION
    optimizer, accumulate = SGD(wrapped.parameters(), lr=0.1), 2
    ranks = dist.get_world_size()
    strategy = FSDPStrategy(parallel_devices=[torch.device("cpu")] * ranks)
    trainer: Any = SimpleNamespace(strategy=strategy, world_size=ranks, accumulate_grad_batches=accumulate, datamodule=None)
    module: Any = SimpleNamespace(automatic_optimization=True)
    callback = TokenNormalizedGradients()
    callback.on_fit_start(trainer, module)
    callback.on_train_start(trainer, module)
    steps = []
    for window in micro_batches(rank):
        callback.on_before_zero_grad(trainer, module, optimizer)
        optimizer.zero_grad()
        for number, sources in enumerate(window):
            batch = pack_row(sources, multiple=4)
            callback.on_train_batch_start(trainer, module, batch, number)
            inputs = {name: value for name, value in batch.model_inputs().items() if "labels" not in name}
            logits = wrapped(**inputs).logits[0]
            total = nn.functional.cross_entropy(logits, batch.shift_labels[0], ignore_index=IGNORE, reduction="sum")
            loss = total / batch.loss_mask.sum().clamp(min=1) / accumulate
            callback.on_before_backward(trainer, module, loss)
            loss.backward()
        callback.on_before_optimizer_step(trainer, module, optimizer)
        own = {name.replace("_fsdp_wrapped_module.", ""): p.grad for name, p in wrapped.named_parameters()}
        group = None if pairs is None else pairs.get_group(1)
        steps.append({name: _whole(own[name], group).reshape(shape) for name, shape in shapes.items()})
        wrapped.clip_grad_norm_(CLIP)
        optimizer.step()
    active.restore()
    return steps


def _whole(own: Tensor | None, group: Any) -> Tensor:
    # What each rank holds of a gradient, end to end.
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, torch.empty(0) if own is None else own.detach().flatten().clone(), group=group)
    return torch.cat(parts)


def run_pairs(argument: dict[str, Any]) -> None:
    """Four ranks, forked so that modules are imported once."""
    start_processes(run_pair, args=(argument["folder"],), nprocs=4, start_method="fork")


def run_pair(rank: int, folder: str) -> None:
    """Body of one of four ranks, sharded inside pairs; both pairs get the same rows."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 4), rank=rank, world_size=4)
    torch.save(fully_sharded_by_hand(rank % 2, init_device_mesh("cpu", (2, 2))), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_fsdp_in_pairs_is_the_unpacked_run(tmp_path: Path) -> None:
    on_ranks("tests.test_strategies:run_pairs", {"folder": str(tmp_path)}, folder=tmp_path / "ranks", ranks=1)
    expected = fit_unpacked("32-true", windows((0, 1), 2))
    for rank in range(4):
        raw = torch.load(tmp_path / f"{rank}.pt")
        assert len(raw) == 2
        for step in range(2):
            assert relative(raw[step], expected.raw[step]) <= 16 * ROUNDOFF["32-true"]


def test_two_ranks_are_the_unpacked_run(tmp_path: Path) -> None:
    counts = [[[int((s.labels != IGNORE).sum()) for s in m] for m in window] for r in range(2) for window in micro_batches(r)]
    assert counts[2][1] == [0], "a micro-batch without targets"
    assert sum(counts[0][0]) > 10 * sum(counts[0][1]), "micro-batches of very different numbers of targets"
    on_ranks("tests.test_strategies:run_rank", {"folder": str(tmp_path)}, folder=tmp_path / "ranks")
    alone, both = fit_unpacked("32-true", windows((0,), 2)), fit_unpacked("32-true", windows((0, 1), 2))
    assert relative(alone.raw[0], both.raw[0]) > 0.1, "the other rank has to matter"
    for name in (*CASES, "fsdp"):
        case = CASES.get(name, CASES["ddp"])
        expected = fit_unpacked(case.precision, windows((0,) if case.same_rows else (0, 1), case.accumulate))
        tolerance = 16 * ROUNDOFF[case.precision]
        for rank in range(2):
            saved = torch.load(tmp_path / f"{name}.{rank}.pt")
            assert len(saved["raw"]) == 4 // case.accumulate, name
            # Without clipping, the second step of tensor parallelism is another one.
            for step in range(1 if case.kind is Tensors else 4 // case.accumulate):
                assert relative(saved["raw"][step], expected.raw[step]) <= tolerance, (name, step)
            assert len(saved["clipped"]) in (0, len(expected.clipped))
            for found, clipped in zip(saved["clipped"], expected.clipped, strict=False):
                assert relative(found, clipped) <= tolerance, name
    refused = r"gradient of model\.model\.embed_tokens\.weight is not averaged over the 2 data-parallel ranks.*fully_shard.*"
    for rank in range(2):
        messages = torch.load(tmp_path / f"unaveraged.{rank}.pt")
        for message, way_out in zip(messages, (OFF, "context=1", "or train without TokenNormalizer", "context=1"), strict=True):
            assert re.search(refused + way_out, message)


# --- models inside of what strategies and compilers put around them ------------------------------------------------------


@SCRIPT
def test_models_are_found_inside_wrappers(tmp_path: Path) -> None:
    model = tiny_model("llama")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        around: list[nn.Module] = [
            torch.compile(model),
            DistributedDataParallel(model),
            torch.compile(DistributedDataParallel(model)),
        ]
        for wrapper in around:
            assert not isinstance(wrapper, type(model))
            (found,) = find_models(nn.ModuleList([wrapper]))
            assert found is model
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert type(model).__name__ == "FSDPLlamaForCausalLM"
        (found,) = find_models(nn.ModuleList([torch.compile(model)]))
        assert found is model
        assert inspect_model(found) == []
    finally:
        dist.destroy_process_group()


class Losing(LlamaDecoderLayer):
    """Hands no boundaries on."""

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        return hidden_states + self.self_attn(hidden_states=hidden_states, attention_mask=attention_mask)[0]


def losses_of(model: Any, layer: Any) -> str:
    """What the inspection says when ``layer`` of ``model`` is one that hands no boundaries on."""
    kind, layer.__class__ = layer.__class__, Losing
    try:
        return str(inspect_model(model))
    finally:
        layer.__class__ = kind


@SCRIPT
@pytest.mark.parametrize("wrap", [None, checkpoint_wrapper, torch.compile])
def test_what_a_wrapped_attention_loses_is_found(wrap: Callable[..., Any] | None) -> None:
    model = tiny_model("llama")
    layer = model.model.layers[0]
    if wrap is not None:
        layer.self_attn = wrap(layer.self_attn)
        assert not isinstance(layer.self_attn, LlamaAttention)
    assert inspect_model(model) == []
    assert "Losing.self_attn" in losses_of(model, layer)


# --- refusals ----------------------------------------------------------------------------------------------------------


class Engine(SingleDeviceStrategy):
    """Accumulates gradients where nobody sees them."""

    @property
    def handles_gradient_accumulation(self) -> bool:
        return True


class OwnEngine(DeepSpeedStrategy):
    """An engine that is known by its base class only."""

    handles_gradient_accumulation = False

    def __init__(self) -> None: ...


OFF = r"or switch this off with PackedAttention\(token_normalization=False\)"


def test_engines_that_accumulate_are_refused_before_the_first_step() -> None:
    trainer = quiet_trainer(
        strategy=Engine(device="cpu"), callbacks=[PackedAttention(monitor=False)], max_epochs=1, accumulate_grad_batches=2
    )
    module = Packed(tiny_model("llama"))
    with pytest.raises(ValueError, match=rf"Engine accumulates gradients inside its engine.*use DDPStrategy.*{OFF}"):
        trainer.fit(module, datamodule=Data([pack_row(make_sources())]))
    assert module.batches == []


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (OwnEngine, "OwnEngine: gradients per target token are known to be exact with"),
        (
            lambda: DDPStrategy(ddp_comm_state=PostLocalSGDState(None, None, 10)),
            "DDPStrategy with PostLocalSGDState averages weights and not gradients.*leave ddp_comm_state out",
        ),
        (lambda: FSDPStrategy(process_group=object()), r"FSDPStrategy\(process_group=...\).*HYBRID_SHARD"),
    ],
)
def test_strategies_that_are_not_exact_are_refused(strategy: Callable[[], Any], message: str) -> None:
    trainer: Any = SimpleNamespace(strategy=strategy())
    module: Any = SimpleNamespace(automatic_optimization=True)
    with pytest.raises(ValueError, match=f"{message}.*{OFF}"):
        TokenNormalizedGradients().on_fit_start(trainer, module)
