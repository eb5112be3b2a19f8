"""Three owners of packing, one result: while reading, written ahead, and in the trainer, of the same 2,000 sources.

The reference packs nothing: padded batches through transformers' own attention, with the shift and the loss written out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from lightning_pack import (
    EnergonPackDataModule,
    PackedAttention,
    PackingMonitor,
    PackingPolicy,
    pack_loader,
    packed_row,
)
from lightning_pack.metrics import PackingStats
from lightning_pack.offline import Manifest
from lightning_pack.source import IGNORE, EncodedSource
from tests.numbers_data import lengths, write_webdataset
from tests.packed_rows import Source, pack_rows, sources_of
from tests.padded_batches import Batches, HuggingFaceModule, pad, stay_double
from tests.tiny_models import VOCABULARY, gradients_of, largest_difference, quiet_trainer, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.*(is|are) left out of training")

SOURCES = 2000
#: Rows have one width, so that every owner counts the same slots; sources are aligned, so that pads lie between them too.
POLICY = PackingPolicy(128, algorithm="minimum_bin_slack", multiple=4, width="fixed")
BATCH = 12
RATE = 0.05


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_double(monkeypatch)


# --- the data ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """``{"n": length, "prompt": p, "id": i}`` -> n tokens, of which the first p are no targets, under the key ``str(i)``."""

    pad_id: int = 0

    def __call__(self, key: str, record: Mapping[str, Any]) -> EncodedSource:
        number = record["id"]
        ids = 3 + (17 * number + (5 + number % 7) * torch.arange(record["n"])) % (VOCABULARY - 3)
        labels = ids.clone()
        labels[: record["prompt"]] = IGNORE
        source = EncodedSource.of(str(number), ids, labels)
        source.group = record.get("group")
        return source

    def fingerprint(self) -> dict[str, Any]:
        return {"type": "PromptEncoder"}


def all_records() -> list[dict[str, Any]]:
    """Long-tailed; some are longer than a row, some have no target, some no token."""
    records = [{"n": n, "prompt": 1 + i % 3, "id": i} for i, n in enumerate(lengths(SOURCES, most=80, seed=3))]
    for i in range(30, SOURCES, 97):
        records[i]["prompt"] = records[i]["n"]
    for i in range(40, SOURCES, 89):
        records[i]["n"] = POLICY.capacity + 1 + i % 20
    for i in (5, 900, 1999):
        records[i]["n"] = 0
    return records


RECORDS = all_records()
ENCODED = [PromptEncoder()("", record) for record in RECORDS]


def reason_of(source: EncodedSource) -> str | None:
    if not len(source):
        return "empty"
    if len(source) > POLICY.capacity:
        return "overlength"
    return None if (source.labels != IGNORE).any() else "no_targets"


KEPT = {source.key: source for source in ENCODED if reason_of(source) is None}
GONE = [source for source in ENCODED if reason_of(source) is not None]


def expected_of(source: EncodedSource) -> Source:
    ids, labels = source.input_ids.tolist(), source.labels.tolist()
    return tuple(ids), tuple(labels), (*labels[1:], IGNORE), tuple(range(len(ids)))


EXPECTED = {key: expected_of(source) for key, source in KEPT.items()}


def collate(sources: Sequence[EncodedSource]) -> dict[str, Any]:
    return pad(sources, "left") | {"id": [source.key for source in sources]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_webdataset(tmp_path_factory.mktemp("owners") / "sources", {"train": RECORDS})


@pytest.fixture(scope="module")
def rows(data: Path) -> Path:
    settings: dict[str, Any] = {"capacity": POLICY.capacity, "multiple": POLICY.multiple, "width": POLICY.width}
    return pack_rows(data, data.parent / "rows", encoder=PromptEncoder(), **settings).path


# --- training ----------------------------------------------------------------------------------------------------------


def model_of_the_test() -> PreTrainedModel:
    return tiny_model("llama", dtype=torch.float64, num_hidden_layers=1)


@dataclass
class Step:
    """One optimizer step: its sources, mean loss per target token, and gradients as the optimizer gets them."""

    sources: list[tuple[str, Source]] = field(default_factory=list)
    targets: int = 0
    total: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return self.total / self.targets

    @property
    def keys(self) -> list[str]:
        return [key for key, _ in self.sources]


class Recorder(HuggingFaceModule):
    """Calls its model as any module does, and keeps what each optimizer step had."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model_of_the_test()
        self.steps = [Step()]
        self.rows: list[list[str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        row, step = packed_row(batch), self.steps[-1]
        assert row is not None
        self.rows.append(list(row.source_keys))
        targets = int((row.shift_labels != IGNORE).sum())
        step.sources += sources_of([row])
        step.targets += targets
        step.total += loss.item() * targets
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        # After the callbacks, of which one normalizes by target tokens.
        self.steps[-1].gradients = gradients_of(self.model)
        self.steps.append(Step())

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=RATE)


@dataclass(frozen=True)
class Run:
    steps: list[Step]
    #: Keys, row by row.
    rows: list[list[str]]
    shapes: list[list[int]]
    stats: PackingStats
    model: torch.nn.Module


def train(given: Any, *, accumulate: int, policy: PackingPolicy | None = None) -> Run:
    """One pass over a loader or datamodule."""
    module = Recorder()
    trainer = quiet_trainer(
        callbacks=[PackedAttention(policy=policy)], max_epochs=1, accumulate_grad_batches=accumulate, limit_val_batches=0
    )
    where = "datamodule" if isinstance(given, EnergonPackDataModule) else "train_dataloaders"
    trainer.fit(module, **{where: given})
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    (monitor,) = (each for each in callbacks if isinstance(each, PackingMonitor))
    assert not module.steps.pop().sources, "every row must be in a step"
    return Run(module.steps, module.rows, module.shapes, monitor._results["train"], module.model)


def plain_step(model: torch.nn.Module, sources: Iterable[EncodedSource]) -> tuple[float, dict[str, Tensor]]:
    """Mean loss per target and gradients of sources in padded batches, with nothing of packing."""
    ordered = sorted(sources, key=len)
    total, count = 0.0, 0
    model.zero_grad()
    for start in range(0, len(ordered), 100):
        batch = pad(ordered[start : start + 100])
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        targets = batch["labels"][:, 1:]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        loss.backward()
        total, count = total + loss.item(), count + int((targets != IGNORE).sum())
    return total / count, {name: gradient / count for name, gradient in gradients_of(model).items()}


def gone_by_reason() -> tuple[dict[str, int], dict[str, int]]:
    sources = Counter(str(reason_of(source)) for source in GONE)
    tokens = {reason: sum(len(source) for source in GONE if reason_of(source) == reason) for reason in sources}
    return dict(sources), tokens


def check_counts(name: str, stats: PackingStats) -> None:
    """The monitor counts what there is, whoever packed it."""
    real = sum(len(source) for source in KEPT.values())
    targets = sum(int((source.labels != IGNORE).sum()) for source in KEPT.values())
    assert (stats.sources, stats.real_tokens, stats.target_tokens) == (len(KEPT), real, targets), name
    # What prepack leaves out it tells itself, once.
    gone = ({}, {}) if name == "offline" else gone_by_reason()
    assert (stats.left_out, stats.left_out_tokens) == gone, name


def online(path: Path, **options: Any) -> EnergonPackDataModule:
    settings: dict[str, Any] = {"packing": POLICY, "encoder": PromptEncoder(), "epochs": 1, "num_workers": 0}
    return EnergonPackDataModule(path, **settings | options)


def offline(path: Path) -> EnergonPackDataModule:
    return EnergonPackDataModule(path, epochs=1, num_workers=0)


def test_the_data_has_what_is_to_be_shown(rows: Path) -> None:
    sources, tokens = gone_by_reason()
    assert len(ENCODED) == SOURCES
    assert sources["overlength"] > 20
    assert sources["no_targets"] > 15
    assert sources["empty"] == 3
    assert sum(len(source) % POLICY.multiple > 0 for source in KEPT.values()) > 1000, "pads inside rows"
    assert any(source.labels[1] == IGNORE for source in KEPT.values()), "prompts"
    written = Manifest.read(rows)
    assert written is not None
    found = written.splits["train"].left_out
    assert {reason: each.sources for reason, each in found.items()} == sources
    assert {reason: each.tokens for reason, each in found.items()} == tokens


def test_each_owner_trains_on_every_source_once_with_the_same_gradient(data: Path, rows: Path) -> None:
    """Each in its own groups and order, the whole pass in one optimizer step."""
    generator = torch.Generator().manual_seed(1)
    loader: Any = DataLoader(ENCODED, batch_size=BATCH, shuffle=True, generator=generator, collate_fn=collate)  # type: ignore[arg-type]
    by_batch = replace(POLICY, width="variable")
    everything = 10_000
    runs = {
        "online": train(online(data), accumulate=everything),
        "offline": train(offline(rows), accumulate=everything),
        "over several batches": train(pack_loader(loader, POLICY), accumulate=everything),
        "in each batch": train(loader, policy=by_batch, accumulate=everything),
    }
    model = model_of_the_test()
    loss, gradients = plain_step(model, KEPT.values())
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-2
    groups = set()
    for name, run in runs.items():
        (step,) = run.steps
        assert len(run.shapes) > 100, name
        assert sorted(step.keys) == sorted(KEPT), name
        assert dict(step.sources) == EXPECTED, name
        assert abs(step.loss - loss) < 1e-10, name
        assert largest_difference(step.gradients, gradients) < 1e-10, name
        check_counts(name, run.stats)
        groups.add(tuple(step.keys))
    assert len(groups) == len(runs), "each owner decides by itself"
    # A row of the trainer holds all packs of its batch.
    assert max(width for _, width in runs["in each batch"].shapes) > 2 * POLICY.capacity
    fill = {name: run.stats.real_tokens / run.stats.slots for name, run in runs.items()}
    del fill["in each batch"]
    assert fill["offline"] == max(fill.values())
    assert min(fill.values()) > 0.9, "all but the pads that align sources"


def test_the_same_groups_give_the_same_run_step_by_step(rows: Path, tmp_path: Path) -> None:
    """The rows that were written decide for all: what each optimizer step had, its loss, its gradients, and every count."""
    accumulate = 8
    replayed = train(offline(rows), accumulate=accumulate)
    groups = replayed.rows
    assert len(groups) > 200
    # Those that are left out ride in the first batches, so that the others can tell of them too.
    batches = [[KEPT[key] for key in group] + GONE[at : at + 1] for at, group in enumerate(groups)]
    assert len(GONE) < len(batches)
    # While reading, a field of the records keeps the groups apart, and nothing is shuffled.
    records = [RECORDS[int(source.key)] | {"group": str(at)} for at, batch in enumerate(batches) for source in batch]
    folder = write_webdataset(tmp_path / "grouped", {"train": records}, shards=1)
    as_read = replace(POLICY, algorithm="concatenative", buffer_size=SOURCES, carry_over=False)
    as_they_come = {"shuffle_buffer_size": 0, "max_samples_per_sequence": None}
    runs = {
        "online": train(online(folder, packing=as_read, **as_they_come), accumulate=accumulate),
        "over several batches": train(pack_loader(batches, replace(POLICY, carry_over=False), window=1), accumulate=accumulate),
        "in each batch": train(Batches(*(lambda b=b: collate(b) for b in batches)), policy=POLICY, accumulate=accumulate),
    }
    model = model_of_the_test()
    optimizer = SGD(model.parameters(), lr=RATE)
    unpacked = []
    for step in replayed.steps:
        unpacked.append(plain_step(model, [KEPT[key] for key in step.keys]))
        for name, parameter in model.named_parameters():
            parameter.grad = unpacked[-1][1][name]
        optimizer.step()
    moved = [(a - b).detach() for a, b in zip(model.parameters(), model_of_the_test().parameters(), strict=True)]
    assert max(float(each.abs().max()) for each in moved) > 1e-2, "the run must have moved the weights"
    assert len(unpacked) == -(-len(groups) // accumulate) > 20
    for name, run in {"offline": replayed, **runs}.items():
        assert len(run.steps) == len(unpacked), name
        for step, other, (loss, gradients) in zip(run.steps, replayed.steps, unpacked, strict=True):
            assert sorted(step.keys) == sorted(other.keys), name
            assert dict(step.sources) == {key: EXPECTED[key] for key in step.keys}, name
            assert abs(step.loss - loss) < 1e-10, name
            assert largest_difference(step.gradients, gradients) < 1e-10, name
        check_counts(name, run.stats)
        assert counts_of_rows(run.stats) == counts_of_rows(replayed.stats), name
    written = Manifest.read(rows)
    assert written is not None
    split = written.splits["train"]
    assert counts_of_rows(replayed.stats)[:3] == (split.rows, split.slots, split.alignment)
    assert 0.8 < split.fill < 1
    assert split.tail > 0


def counts_of_rows(stats: PackingStats) -> tuple[int, int, int, float, Any]:
    return stats.packs, stats.slots, stats.alignment_padding, stats.fill, stats.lengths
