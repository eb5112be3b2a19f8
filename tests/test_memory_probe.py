"""The memory probe of PackedAttention in a real Trainer: it leaves no trace, and says what to lower."""

from __future__ import annotations

import multiprocessing
import random
import re
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.optim import AdamW
from torchmetrics import MeanMetric

from lightning_pack import EnergonPackDataModule, PackedBatch, PackingPolicy
from lightning_pack.callbacks import PackedAttention
from lightning_pack.callbacks.heaviest_rows import heaviest_rows, ordinary_token_ids
from lightning_pack.callbacks.memory_probe import MemoryProbe, MemoryProbeError
from lightning_pack.callbacks.optimizer_memory import missing_state
from lightning_pack.cli import _is_for_users
from lightning_pack.module import PackedCausalLM
from tests.numbers_data import NumberEncoder
from tests.ranks import on_ranks
from tests.tiny_models import Rows, make_sources, pack_row, quiet_trainer, tiny_config, tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:source .* is left out of training"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:.*sources are left out of training so far"),
    # The step leaves a layer in evaluation mode, and a second fit finds it there.
    pytest.mark.filterwarnings("ignore:Found 1 module.* in eval mode"),
]

IDS = torch.arange(5, 30)


class Drawing(pl.LightningModule):
    """Draws random numbers of all kinds, and leaves traces of every kind in itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = tiny_model("llama", attention_dropout=0.0, vocab_size=600)
        self.norm = nn.BatchNorm1d(600)
        self.dropout = nn.Dropout(0.2)
        self.norm.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.mean = MeanMetric()
        self.keys: list[list[str]] = []
        self.recent: deque[float] = deque([0.5], maxlen=2)
        self.nested: dict[str, Any] = {"seen": {"widths": [0]}}
        self.own = {"torch": torch.Generator().manual_seed(3), "numpy": np.random.default_rng(3), "python": random.Random(3)}
        self.steps = 0

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        logits = self.model(**{k: v for k, v in batch.model_inputs().items() if k not in ("labels", "shift_labels")}).logits
        logits = self.dropout(self.norm(logits[0])) * (1 + random.random() + np.random.rand()) / 2  # noqa: NPY002
        loss = nn.functional.cross_entropy(logits, batch.shift_labels[0])
        loss = loss * (
            1 + torch.rand((), generator=self.own["torch"]) + self.own["numpy"].random() + self.own["python"].random()
        )
        self.norm.calls += 1
        # The first step is the only one in training mode.
        self.norm.eval()
        self.mean.update(loss.detach())
        self.keys.append(batch.source_keys)
        self.recent.append(loss.item())
        self.nested["seen"]["widths"].append(batch.input_ids.shape[-1])
        self.steps += 1
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1, sync_dist=True)
        self.log("norm", self.norm.running_mean.sum(), on_epoch=True, batch_size=1)
        return loss

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> AdamW:
        return AdamW(self.parameters(), lr=1e-3)


class Probed(PackedAttention):
    """Counts the steps that the probe makes, and what they were given."""

    rows: list[list[str]]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        rows: list[list[str]] = []
        step = type(pl_module).training_step

        def noted(module: Any, batch: PackedBatch, batch_idx: int) -> Any:
            rows.append(batch.source_keys)
            return step(module, batch, batch_idx)

        type(pl_module).training_step = noted  # type: ignore[method-assign]
        try:
            super().on_train_start(trainer, pl_module)
        finally:
            type(pl_module).training_step = step  # type: ignore[method-assign]
        self.rows = rows


def data(folder: str | Path, *, capacity: int = 64) -> EnergonPackDataModule:
    policy = PackingPolicy(capacity=capacity, buffer_size=16, multiple=4, algorithm="exact_fill")
    return EnergonPackDataModule(str(folder), encoder=NumberEncoder(), packing=policy, num_workers=0, packs_per_batch=2)


def fit(folder: str | Path, *, probe: bool, steps: int, module: pl.LightningModule | None = None, **options: Any) -> Any:
    """Fit; what is left afterwards, and the rows that were probed."""
    pl.seed_everything(7, verbose=False)
    callback = Probed(probe_memory=probe)
    resume, save = options.pop("resume", None), options.pop("save", None)
    trainer = quiet_trainer(callbacks=[callback], max_steps=steps, limit_val_batches=0, log_every_n_steps=1, **options)
    module = Drawing() if module is None else module
    trainer.fit(module, data(folder), ckpt_path=resume, **({"weights_only": True} if resume else {}))
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer, module, callback


def remains(trainer: pl.Trainer, module: Any) -> dict[str, Any]:
    state = trainer.datamodule.state_dict()  # type: ignore[attr-defined]
    return {
        "weights": module.state_dict(),
        "gradients": [p.grad for p in module.parameters()],
        "optimizer": trainer.optimizers[0].state_dict(),
        "random": [torch.get_rng_state(), random.getstate(), torch.from_numpy(np.random.get_state()[1].astype(np.int64))],  # noqa: NPY002
        "modes": [part.training for part in module.modules()],
        "metric": [module.mean.mean_value, module.mean.weight, module.mean._update_count],
        "own": [module.keys, list(module.recent), module.nested, module.steps],
        "logged": {name: value for name, value in trainer.callback_metrics.items() if "per_second" not in name},
        "loops": trainer.fit_loop.state_dict(),
        "data": state,
    }


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """Where two nested values are not bitwise equal."""
    if type(a) is not type(b):
        return [at]
    if isinstance(a, dict):
        return [at] if a.keys() != b.keys() else [d for k in a for d in differences(a[k], b[k], f"{at}/{k}")]
    if isinstance(a, list | tuple):
        return (
            [at]
            if len(a) != len(b)
            else [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{at}/{i}")]
        )
    if isinstance(a, Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [at]
    return [] if a == b else [at]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_with_the_probe_is_bitwise_the_run_without(numbers: Path, tmp_path: Path, precision: str) -> None:
    def run(probe: bool, steps: int, **options: Any) -> Any:
        return fit(numbers, probe=probe, steps=steps, precision=precision, accumulate_grad_batches=2, **options)

    plain = run(False, 2, save=tmp_path / "half.ckpt")
    probed = run(True, 2)
    assert plain[2].rows == []
    assert [len(keys) for keys in probed[2].rows] == [2, 32], "one source in each of two packs, then sixteen"
    without, with_probe = remains(*plain[:2]), remains(*probed[:2])
    assert without["own"][3] == 4
    assert without["weights"]["norm.calls"] == 4
    assert {"loss_epoch", "norm", "mean", "packing/fill"} <= without["logged"].keys()
    assert differences(without, with_probe) == []
    # Resumed, where the optimizer has a state and the position is not the beginning.
    ends = [run(probe, 4, resume=tmp_path / "half.ckpt") for probe in (False, True)]
    assert [len(end[2].rows) for end in ends] == [0, 2]
    assert ends[0][0].global_step == 4
    assert ends[0][1].keys[:1] != plain[1].keys[:1]
    assert differences(remains(*ends[0][:2]), remains(*ends[1][:2])) == []
    assert differences(without, remains(*ends[0][:2])), "the comparison has to see a difference where there is one"


def two_ranks(argument: dict[str, Any]) -> dict[str, Any]:
    """What differs between runs with and without the probe, and what is said where it fails."""
    data_at, group = argument["data"], {"devices": 2, "strategy": "ddp"}
    without, probed = (fit(data_at, probe=probe, steps=3, **group) for probe in (False, True))
    ends = [remains(*run[:2]) for run in (without, probed)]
    found: dict[str, Any] = {"differences": differences(*ends), "rows": len(probed[2].rows), "keys": ends[0]["own"][0]}
    # Only one rank runs out of memory.
    with pytest.raises(MemoryProbeError) as raised:
        fit(data_at, probe=True, steps=1, module=Narrow(rank=1), **group)
    found["error"] = str(raised.value)
    static = DDPStrategy(process_group_backend="gloo", static_graph=True)
    with pytest.raises(ValueError, match=r"static graph: leave static_graph=True out.*probe_memory=False"):
        fit(data_at, probe=True, steps=1, devices=2, strategy=static)
    return found


@pytest.mark.slow
def test_two_ranks_neither_differ_nor_hang(numbers: Path, tmp_path: Path) -> None:
    first, second = on_ranks("tests.test_memory_probe:two_ranks", {"data": str(numbers)}, folder=tmp_path)
    assert len(first["keys"]) == 3
    assert first["keys"] != second["keys"]
    for rank in (first, second):
        assert (rank["differences"], rank["rows"]) == ([], 2)
    assert "another rank ran out of it" in first["error"]
    assert "Tried to allocate" in second["error"]


class Narrow(Drawing):
    """Runs out of memory on rows of many sources, or of one."""

    def __init__(self, error: type[BaseException] = torch.OutOfMemoryError, *, most: int = 8, rank: int = 0) -> None:
        super().__init__()
        self.error, self.most, self.rank = error, most, rank

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        random.random()
        if len(batch.source_keys) > self.most and self.global_rank == self.rank:
            raise self.error("Tried to allocate 20.00 GiB: DefaultCPUAllocator: can't allocate memory")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, MemoryError])
@pytest.mark.parametrize(("most", "row"), [(8, "16 sources of 4 tokens"), (0, "1 source of 64 tokens")])
def test_memory_that_runs_out_names_the_row_and_what_to_lower(
    numbers: Path, error: type[BaseException], most: int, row: str
) -> None:
    module = Narrow(error, most=most)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    message = (
        rf"a step on {row} in each of 2 packs \(capacity=64, packs_per_batch=2, 128 tokens wide\).*Lower capacity=64 or "
        r"packs_per_batch=2 .*gradient_checkpointing.*Tried to allocate 20.00 GiB"
    )
    with pytest.raises(MemoryProbeError, match=message) as raised:
        fit(numbers, probe=True, steps=1, module=module)
    assert type(raised.value.__cause__) is error
    # The command line prints it without a traceback.
    assert _is_for_users(raised.value)
    assert differences(before, dict(module.state_dict())) == []
    assert all(parameter.grad is None for parameter in module.parameters())
    assert (module.keys, module.model.config._attn_implementation) == ([], "sdpa")


def said_without_memory(folder: Path) -> str:
    """What a run says that may have 512 MiB more than its process has before: one with nothing else in it, since a process
    that did much before holds memory that it can use again."""
    import resource

    # The logits of a full row take 640 MiB, those of the rows of the data 5 MiB.
    module = PackedCausalLM(tiny_config("llama", vocab_size=20480, hidden_size=8, intermediate_size=8, num_hidden_layers=1))
    trainer = quiet_trainer(callbacks=[PackedAttention(probe_memory=True)], max_steps=1, limit_val_batches=0)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        trainer.fit(module, data(folder, capacity=4096))
    except MemoryProbeError as e:
        return str(e)
    return "nothing"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs to know its own address space")
def test_memory_that_really_runs_out_on_the_cpu(numbers: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        said = fresh.submit(said_without_memory, numbers).result()
    assert re.search(r"1 source of 4096 tokens in each of 2 packs.*What was said: .*llocat", said), said


class Giving(pl.Callback):
    """Gives some parameters a gradient before the probe runs; Lightning has taken away all others."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.given = [torch.full_like(parameter, 0.5) for parameter in list(pl_module.parameters())[:3]]
        for parameter, gradient in zip(pl_module.parameters(), self.given, strict=False):
            parameter.grad = gradient


class Looking(pl.Callback):
    """Looks at the gradients once the probe has run."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = [parameter.grad for parameter in pl_module.parameters()]
        self.values = [gradient.unique().tolist() for gradient in self.found if gradient is not None]


def test_gradients_that_were_there_stay_there(numbers: Path) -> None:
    giving, looking, probed = Giving(), Looking(), Probed(probe_memory=True)
    trainer = quiet_trainer(callbacks=[giving, probed, looking], max_steps=1, limit_val_batches=0)
    trainer.fit(Drawing(), data(numbers))
    assert len(probed.rows) == 2
    assert [found is given for found, given in zip(looking.found, giving.given, strict=False)] == [True] * 3
    assert set(looking.found[3:]) == {None}
    assert looking.values == [[0.5]] * 3


def test_other_errors_of_a_step_stay_what_they_are(numbers: Path) -> None:
    class Faulty(Drawing):
        def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        fit(numbers, probe=True, steps=1, module=Faulty())
    assert not isinstance(raised.value, MemoryProbeError)


class Manual(Drawing):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Changing(Drawing):
    def __init__(self, *, unseen: bool = False) -> None:
        super().__init__()
        self.unseen = unseen

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        # Through .data, no version counts a change.
        weight = self.norm.weight.data if self.unseen else self.norm.weight.detach()
        version = self.norm.weight._version
        weight.mul_(0.9)
        assert (self.norm.weight._version == version) is self.unseen
        return super().training_step(batch, batch_idx)


def test_what_cannot_be_probed_without_a_trace_is_refused(numbers: Path) -> None:
    trainer = quiet_trainer(callbacks=[PackedAttention(probe_memory=True, token_normalization=False)], max_steps=1)
    with pytest.raises(ValueError, match=r"Manual optimizes manually.*probe_memory=False"):
        trainer.fit(Manual(), data(numbers))
    for unseen in (False, True):
        with pytest.raises(ValueError, match=r"Changing changes weights in place.*on_train_batch_end"):
            fit(numbers, probe=True, steps=1, module=Changing(unseen=unseen))
    learned = PackedCausalLM(
        {"model_type": "gpt2", "vocab_size": 600, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
    )
    with pytest.raises(
        ValueError, match=r"capacity=\d+ tokens, and GPT2LMHeadModel has learned 16 positions.*probe_memory=False"
    ):
        fit(numbers, probe=True, steps=1, module=learned)
    exchanged = r"a step exchanges sharded weights and gradients.*a single device or DDPStrategy.*probe_memory=False"
    with pytest.raises(ValueError, match=f"under ModelParallelStrategy {exchanged}"):
        MemoryProbe(quiet_trainer(strategy=ModelParallelStrategy()), Drawing())
    with pytest.raises(ValueError, match=f"under FSDPStrategy {exchanged}"):
        MemoryProbe(SimpleNamespace(strategy=FSDPStrategy()), Drawing())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a step under DeepSpeedStrategy is not known.*engine.*probe_memory=False"):
        MemoryProbe(SimpleNamespace(strategy=object.__new__(DeepSpeedStrategy)), Drawing())  # type: ignore[arg-type]


class Loader(LightningDataModule):
    def train_dataloader(self) -> Rows:
        return Rows(pack_row(make_sources(), multiple=4))


def test_without_packing_rules_the_probe_is_refused() -> None:
    for arguments, said in ((Loader().train_dataloader(), "there is no datamodule"), (Loader(), "Loader has none")):
        with pytest.raises(ValueError, match=rf"{said}: fit with a datamodule whose attribute packing is the PackingPolicy"):
            quiet_trainer(callbacks=[PackedAttention(probe_memory=True)], max_steps=1).fit(Drawing(), arguments)


@pytest.mark.parametrize(
    ("policy", "lengths"),
    [
        ({"capacity": 64, "multiple": 4}, [[64], [4] * 16]),
        ({"capacity": 64}, [[64], [2] * 32]),
        ({"capacity": 63}, [[63], [3] + [2] * 30]),
        ({"capacity": 64, "max_sources": 3, "multiple": 4}, [[64], [24, 20, 20]]),
        ({"capacity": 64, "max_sources": 1}, [[64]]),
        ({"capacity": 64, "width": 96}, [[64], [2] * 32]),
    ],
)
def test_the_heaviest_rows_are_full(policy: dict[str, Any], lengths: list[list[int]]) -> None:
    rules = PackingPolicy(algorithm="exact_fill", **policy)
    rows = heaviest_rows(rules, packs_per_batch=2, token_ids=IDS)
    assert [row.cu_seqlens.diff().tolist() for row in rows.values()] == [each * 2 for each in lengths]
    for row in rows.values():
        assert row.input_ids.shape[-1] == 2 * (policy.get("width") or sum(lengths[0]))
        assert set(row.input_ids[0].tolist()) <= set(IDS.tolist())
        # Every pack is one that the policy's own limits allow.
        assert rules.pack(row.cu_seqlens.diff().tolist())


def test_ids_of_the_probe_have_no_meaning_of_their_own() -> None:
    module = nn.ModuleList([tiny_model("llama", bos_token_id=1, eos_token_id=[2, 9]), tiny_model("qwen2", vocab_size=40)])
    assert {1, 2, 9} & set(range(40))
    assert not {1, 2, 9} & set(ordinary_token_ids(module).tolist())
    assert ordinary_token_ids(module).max() == 39


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop", "Adagrad"])
def test_the_state_of_later_steps_is_counted_and_not_made(kind: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    if kind != "Adagrad":
        assert not optimizer.state
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = sorted(value.shape for value in missing_state(optimizer))
    assert differences(before, dict(model.state_dict())) == []
    assert kind == "Adagrad" or not optimizer.state
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    scheduler.step()
    made = [v.shape for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.ndim]
    # Adagrad makes its state when it is constructed.
    assert expected == ([] if kind == "Adagrad" else sorted(made))
    assert made
    assert missing_state(optimizer) == []


def test_of_an_optimizer_that_needs_a_closure_nothing_is_counted() -> None:
    optimizer = torch.optim.LBFGS(nn.Linear(8, 4).parameters())
    with pytest.raises(TypeError, match="closure"):
        optimizer.step()
    assert missing_state(optimizer) == []
