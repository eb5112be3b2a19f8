"""pack_loader: rows over several batches of any loader, every source once, and exact positions."""

from __future__ import annotations

import io
import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import DataCollatorWithFlattening

from lightning_pack import (
    BatchFields,
    CollatedBatchError,
    PackedAttention,
    PackedBatch,
    PackingPolicy,
    SourceOutput,
    in_reading_order,
    pack_loader,
    unpack,
)
from lightning_pack.collated import pack_collated
from lightning_pack.collated.fields import KEY_NAMES
from lightning_pack.loader_progress import LoaderProgress
from lightning_pack.resume import ResumeError
from lightning_pack.source import IGNORE, EncodedSource
from lightning_pack.tracked import LEAST_KEPT
from tests.padded_batches import Batches, HuggingFaceModule, pad, stay_double
from tests.ranks import on_ranks
from tests.test_padded_training import PARTS, farthest
from tests.tiny_models import alone_loss, make_sources, quiet_trainer, tiny_model
from tests.training import digest

# torchdata 0.11 calls what torch 2.13 calls deprecated; Lightning tells that a resumed run saves into another folder.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]
torchdata = pytest.importorskip("torchdata.stateful_dataloader")
POLICY = PackingPolicy(24, algorithm="best_fit_decreasing")
LENGTHS = [int(n) for n in torch.randint(2, 20, (60,), generator=torch.Generator().manual_seed(4))]


class Samples(Dataset[EncodedSource]):
    """Sources whose key is their number."""

    def __init__(self, lengths: list[int]) -> None:
        self.sources = make_sources(lengths, prompt=1)
        for number, source in enumerate(self.sources):
            source.key = str(number)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> EncodedSource:
        return self.sources[index]


def collate(sources: list[EncodedSource]) -> dict[str, Any]:
    return pad(sources, "left") | {"id": [source.key for source in sources]}


def stateful(lengths: list[int] = LENGTHS, *, workers: int = 0, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    return torchdata.StatefulDataLoader(
        Samples(lengths), batch_size=4, shuffle=True, generator=generator, collate_fn=collate, num_workers=workers, **options
    )


def by_key(rows: list[PackedBatch]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in rows:
        offsets = row.cu_seqlens_padded.tolist()
        for number, (key, length) in enumerate(zip(row.source_keys, row.cu_seqlens.diff().tolist(), strict=True)):
            assert key not in found, f"source {key} came twice"
            found[key] = row.input_ids[0, offsets[number] : offsets[number] + length].tolist()
    return found


# --- rows --------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    size=st.integers(1, 7),
    window=st.integers(1, 5),
    algorithm=st.sampled_from(["auto", "exact_fill", "minimum_bin_slack", "concatenative"]),
    carry_over=st.booleans(),
)
def test_every_source_comes_once_or_is_reported(
    lengths: list[int], size: int, window: int, algorithm: str, carry_over: bool
) -> None:
    samples = Samples(lengths)
    loader = DataLoader(samples, batch_size=size, collate_fn=collate)
    usable = {key: length for key, length in enumerate(lengths) if 2 <= length <= 24}
    packed = pack_loader(loader, PackingPolicy(24, algorithm=algorithm, carry_over=carry_over, multiple=2), window=window)
    if not usable:
        with pytest.raises(ValueError, match="no row in this pass over the loader"):
            list(packed)
        return
    for _ in range(2):
        rows = list(packed)
        assert by_key(rows) == {str(key): samples[key].input_ids.tolist() for key in usable}
        gone = {row.key: row.reason for each in rows for row in each.left_out}
        expected = {str(i): "overlength" if n > 24 else "no_targets" for i, n in enumerate(lengths) if i not in usable}
        assert gone == expected
        assert all(row.input_ids.shape[1] <= 24 for row in rows)


def test_a_window_packs_better_than_a_batch() -> None:
    loader = DataLoader(Samples(LENGTHS), batch_size=4, collate_fn=collate)
    one, many = (list(pack_loader(loader, POLICY, window=window)) for window in (1, 8))
    assert len(many) < len(one)
    assert any(age > 0 for row in many for age in row.ages)


def test_batches_come_in_every_form() -> None:
    samples = Samples(LENGTHS[:8])
    sources = samples.sources
    expected = by_key(list(pack_loader([sources[:4], sources[4:]], POLICY)))
    assert len(expected) == 8

    def features(chunk: list[EncodedSource]) -> list[dict[str, Any]]:
        return [{"input_ids": s.input_ids.tolist(), "labels": s.labels.tolist(), "id": s.key} for s in chunk]

    flatten = DataCollatorWithFlattening()
    plain = [[{k: v for k, v in f.items() if k != "id"} for f in features(c)] for c in (sources[:4], sources[4:])]
    arrays = [{"input_ids": s.input_ids.numpy().astype(np.int32), "labels": s.labels.numpy()} for s in sources]
    rows = {
        "padded": [collate(sources[:4]), collate(sources[4:])],
        "samples": [features(sources[:4]), features(sources[4:])],
        "arrays": [arrays[:4], arrays[4:]],
        "flattened": [flatten(c, return_tensors="pt") for c in plain],
    }
    for name, batches in rows.items():
        found = by_key(list(pack_loader(batches, POLICY)))
        assert sorted(found.values()) == sorted(expected.values()), name
    shifted = collate(sources)
    labels = torch.full_like(shifted["labels"], IGNORE)
    labels[:, :-1] = shifted.pop("labels")[:, 1:]
    (a,), (b,) = (list(pack_loader([x], PackingPolicy(200))) for x in (collate(sources), shifted | {"shift_labels": labels}))
    assert torch.equal(a.shift_labels, b.shift_labels)


@pytest.mark.parametrize("name", KEY_NAMES)
def test_the_names_of_keys_are_the_same_everywhere(name: str) -> None:
    sources = Samples([5, 4]).sources
    samples = [{"input_ids": s.input_ids, "labels": s.labels, name: key} for s, key in zip(sources, "ab", strict=True)]
    for batch in (pad(sources) | {name: ["a", "b"]}, samples):
        (row,) = pack_loader([batch], POLICY)
        assert sorted(row.source_keys) == ["a", "b"]
    in_place = pack_collated(pad(sources) | {name: ["a", "b"]}, policy=PackingPolicy(24))
    assert in_place is not None
    assert sorted(in_place.source_keys) == ["a", "b"]


ONES = torch.ones(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("x", r"batch 0 is a str, and pack_loader takes dicts"),
        ({"input_ids": ONES, "attention_mask": ONES}, r"batch 0 has neither labels nor shift_labels"),
        ([{"input_ids": [1, 2]}], r"batch 0, row 0 has no labels"),
        ([{"input_ids": [1, 2], "labels": [1]}], r"row 0 has 2 input_ids and 1 labels"),
        ([{"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 0]}], r"sample with padding"),
        ([{"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 2]}], r"sample with padding or several sources"),
        ([{"input_ids": [1, 2], "labels": [1, 2], "x": 3}], r"row 0 holds x, for which.*leave_out=\('x',\)"),
        ([{"input_ids": [[1, 2]], "labels": [1, 2]}], r"input_ids of batch 0, row 0 is no list, array or tensor \[L\]"),
        ([{"input_ids": ["a", "b"], "labels": [1, 2]}], r"input_ids of batch 0, row 0 is no list, array or tensor \[L\]"),
        ([{"input_ids": [1, 2], "labels": np.array([0.5, 1])}], r"labels of batch 0, row 0 is no list, array or tensor \[L\]"),
        (
            {"input_ids": ONES, "attention_mask": ONES, "labels": ONES, "token_type_ids": ONES},
            r"holds token_type_ids, for which a PackedBatch has no place: .*leave_out=\('token_type_ids',\)",
        ),
        (PackedBatch.from_packs([POLICY.build(make_sources((3,)))], pad_id=0), r"batch 0 is a PackedBatch already"),
    ],
)
def test_other_batches_are_refused_by_name(batch: Any, message: str) -> None:
    with pytest.raises(CollatedBatchError, match=message):
        list(pack_loader([batch], POLICY))


def test_settings_that_are_not_used_are_refused() -> None:
    for options, named in (
        ({"buffer_size": 64}, "buffer_size=64"),
        ({"balance": "quadratic", "window": 9}, "balance='quadratic'"),
    ):
        with pytest.raises(ValueError, match=f"does not use {named}"):
            pack_loader([], PackingPolicy(24, **options))
    with pytest.raises(ValueError, match="overlength='split' cuts plain texts"):
        pack_loader([], PackingPolicy(24, overlength="split"))
    with pytest.raises(ValueError, match="window=0"):
        pack_loader([], POLICY, window=0)
    batch = {"input_ids": ONES, "attention_mask": ONES, "labels": ONES, "token_type_ids": ONES}
    (row,) = pack_loader([batch], POLICY, fields=BatchFields(leave_out=("token_type_ids",)))
    assert row.source_keys == ["batch 0, row 0", "batch 0, row 1"]


def test_workers_that_persist_serve_the_next_pass_too() -> None:
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    packed = pack_loader(DataLoader(Samples(LENGTHS), batch_size=4, collate_fn=collate, **options), POLICY)
    first = [digest(row) for row in packed]
    rows = iter(packed)
    next(rows)
    # Left in the middle of a pass.
    del rows
    assert [digest(row) for row in packed] == first == [digest(row) for row in packed]


# --- positions ---------------------------------------------------------------------------------------------------------


def read(packed: Any, *, passes: int, most: int | None = None) -> Iterator[tuple[str, Any]]:
    """Digest of each row, and the state after it is trained on."""
    count = 0
    for _ in range(passes):
        for row in packed:
            packed.trained()
            packed.commit()
            yield digest(row), json.loads(json.dumps(packed.state(), default=lambda t: ["tensor", t.tolist()]))
            count += 1
            if count == most:
                return


def tracked(**options: Any) -> Any:
    workers = options.pop("workers", 0)
    packed = pack_loader(stateful(workers=workers), PackingPolicy(24), window=3, **options)
    packed.tracked = True
    return packed


def test_rows_that_are_never_counted_come_again_without_being_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_pack.tracked.MOST_KEPT_BYTES", 1)
    packed = tracked()
    whole = [digest(row) for row in packed]
    assert len(packed._fetched) == len(whole) > 10
    assert sum(waiting.batch is not None for waiting in packed._fetched) == LEAST_KEPT
    assert [digest(row) for row in packed] == whole
    assert [row for row, _ in read(packed, passes=1)] == whole
    assert not packed._fetched
    other = tracked()
    assert [row for row, _ in read(other, passes=2)] == whole + [row for row, _ in read(packed, passes=1)]


@pytest.mark.parametrize("workers", [0, 2])
def test_restored_after_every_row_the_next_rows_are_the_same(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Workers that are not told to end are waited for so many seconds, each.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 100.0)
    whole = tracked(workers=workers)
    states: list[Any] = [None]
    rows = []
    for _ in range(2):
        for row in whole:
            whole.trained()
            whole.commit()
            rows.append(digest(row))
            states.append(whole.state())
    half = len(rows) // 2
    assert len(set(rows)) == len(rows) > 30
    assert any(state["at"]["emitted"] for state in states[1:])
    assert any(sum(map(len, state["at"]["waiting"])) > 3 for state in states[1:])
    assert states[half]["at"]["epoch"] == 1
    # Each step in this process; with worker processes, which are slow to start, a few of them.
    for k in range(1, len(rows)) if workers == 0 else (3, half):
        again = tracked(workers=workers)
        # As a checkpoint that is loaded without classes.
        torch.save(states[k], file := io.BytesIO())
        again.restore(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        most = len(rows) - k if workers == 0 else min(len(rows) - k, half - 2)
        found = [row for row, _ in read(again, passes=2, most=most)]
        assert found == rows[k : k + most], k
        begun = time.monotonic()
        again.stop()
        assert time.monotonic() - begun < 90, "the workers end at once"


def test_no_token_is_in_a_state_and_lightning_saves_none_itself() -> None:
    packed = tracked()
    assert not isinstance(packed, _Stateful)
    with pytest.raises(TypeError):
        len(packed)
    states = [state for _, state in read(packed, passes=1)]
    assert max(len(json.dumps(state["at"]["waiting"])) for state in states) < 200
    assert all(set(state["at"]) == set(states[0]["at"]) for state in states)


def test_a_changed_loader_is_noticed() -> None:
    packed = tracked()
    state = [packed.state() for _ in zip(read(packed, passes=1), range(5), strict=False)][-1]
    assert state["at"]["waiting"]
    other = pack_loader(stateful(LENGTHS[::-1]), PackingPolicy(24), window=3)
    other.tracked = True
    other.restore(state)
    with pytest.raises(ValueError, match=r"batches \d+ to \d+ are not those that were read before the checkpoint was saved"):
        next(iter(other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "x"}, "algorithm of a loader's state is 'x', not one of exact_fill, minimum_bin_slack"),
        ({"at": {"epoch": 1}}, "a position in a loader should hold begun, digest"),
        ({"at": None}, "a position in a loader should hold"),
        ({"more": 1}, "a loader's state should hold at, algorithm"),
    ],
)
def test_a_state_that_is_none_is_refused(change: dict[str, Any], message: str) -> None:
    packed = tracked()
    next(iter(packed))
    with pytest.raises(ValueError, match=message):
        packed.restore(packed.state() | change)
    for name, value in {"first": -1, "waiting": [[-1]], "digest": 3, "begun": 1}.items():
        with pytest.raises(ValueError, match="of a position in a loader"):
            packed.restore(packed.state() | {"at": packed.state()["at"] | {name: value}})


# --- runs --------------------------------------------------------------------------------------------------------------


class Tiny(LightningModule):
    """Next token by last token, with dropout; remembers its batches."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 64))
        self.model = tiny_model("llama")
        self.model.requires_grad_(False)
        self.loader = loader
        self.seen: list[str] = []

    def train_dataloader(self) -> Any:
        return self.loader

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        self.seen.append(digest(batch))
        return torch.nn.functional.cross_entropy(self.net(batch.input_ids)[0], batch.shift_labels[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def fit(folder: Path, packed: Any, *, steps: int, resume: Path | None = None, hook: bool = False, **options: Any) -> Tiny:
    torch.manual_seed(0)
    module = Tiny(packed if hook else None)
    # A file costs more than a step.
    saving = [] if resume else [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)]
    callbacks = [PackedAttention(monitor=False), *saving]
    trainer = quiet_trainer(callbacks=callbacks, max_steps=steps, enable_checkpointing=bool(saving), **options)
    trainer.fit(module, *([] if hook else [packed]), ckpt_path=resume, weights_only=True if resume else None)
    assert any(isinstance(callback, LoaderProgress) for callback in trainer.callbacks)
    return module


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.filterwarnings("ignore:.*is not in the list of callbacks")
def test_a_run_goes_on_bitwise_from_every_step(tmp_path: Path, hook: bool) -> None:
    steps, window = 12, 2
    packed = lambda: pack_loader(stateful(workers=2 * hook), PackingPolicy(24), window=3)  # noqa: E731
    whole = fit(tmp_path / "whole", packed(), steps=steps, hook=hook, accumulate_grad_batches=window)
    assert len(whole.seen) > 20, "the run goes into a second pass"
    assert len(set(whole.seen)) == len(whole.seen)
    for step in range(1, steps) if not hook else (4, 9):
        checkpoint = tmp_path / "whole" / f"step={step}.ckpt"
        again = fit(tmp_path / "again", packed(), steps=steps, resume=checkpoint, hook=hook, accumulate_grad_batches=window)
        done = len(whole.seen) - len(again.seen)
        assert again.seen == whole.seen[done:], step
        assert step <= done <= step * window
        for a, b in zip(whole.net.parameters(), again.net.parameters(), strict=True):
            assert torch.equal(a, b), step


class Breaking(Tiny):
    """Fails inside an accumulation."""

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        if len(self.seen) == 7:
            raise ArithmeticError("broken on purpose")
        return super().training_step(batch, batch_idx)


class Owner(LightningDataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader


def test_a_run_that_fails_inside_an_accumulation_goes_on_from_its_beginning(tmp_path: Path) -> None:
    def run(kind: type[Tiny], *, resume: Path | None = None) -> Tiny:
        torch.manual_seed(0)
        module = kind()
        saving = ModelCheckpoint(tmp_path, filename="kept", every_n_train_steps=1000, save_on_exception=True)
        callbacks = [PackedAttention(monitor=False), saving]
        options = {"max_steps": 6, "accumulate_grad_batches": 3, "enable_checkpointing": True}
        data = Owner(pack_loader(stateful(), PackingPolicy(24), window=3))
        trainer = quiet_trainer(callbacks=callbacks, **options)
        trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True if resume else None)
        assert "train_dataloader" not in vars(data)
        return module

    whole = run(Tiny)
    with pytest.raises(ArithmeticError):
        run(Breaking)
    (saved,) = tmp_path.glob("*.ckpt")
    again = run(Tiny, resume=saved)
    # The batch that was trained in the open window comes again.
    assert again.seen == whole.seen[6:]
    for a, b in zip(whole.net.parameters(), again.net.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_same_trainer_goes_on_in_the_data() -> None:
    packed = pack_loader(stateful(), PackingPolicy(24), window=3)
    module = Tiny()
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_steps=4)
    trainer.fit(module, packed)
    trainer.fit_loop.epoch_loop.max_steps = 9
    trainer.fit(module, packed)
    whole = Tiny()
    quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_steps=9).fit(
        whole, pack_loader(stateful(), PackingPolicy(24), window=3)
    )
    assert module.seen == whole.seen


def test_evaluation_reads_each_pass_anew() -> None:
    keys: list[str] = []

    class Validating(Tiny):
        def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
            keys.extend(batch.source_keys)

    rows = pack_loader(DataLoader(Samples(LENGTHS), batch_size=4, collate_fn=collate), POLICY, even_ranks=False)
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)])
    for _ in range(2):
        keys.clear()
        trainer.validate(Validating(), rows, verbose=False)
        assert sorted(keys, key=int) == [str(i) for i in range(len(LENGTHS))]


def test_a_loader_serves_others_when_the_fit_is_over() -> None:
    rows = pack_loader(stateful(), PackingPolicy(24), window=3)
    module = Tiny()
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_steps=4)
    trainer.fit(module, rows)
    assert rows.state()["at"]["begun"], "the fit has stopped inside a pass"
    assert rows.state()["at"]["epoch"] == 0
    for _ in range(2):
        assert sorted(by_key(list(rows)), key=int) == [str(number) for number in range(len(LENGTHS))]
    trainer.fit_loop.epoch_loop.max_steps = 9
    trainer.fit(module, rows)
    whole = Tiny()
    quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_steps=9).fit(
        whole, pack_loader(stateful(), PackingPolicy(24), window=3)
    )
    assert module.seen == whole.seen

    class Failing(Tiny):
        def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
            raise ArithmeticError("broken on purpose")

    with pytest.raises(ArithmeticError):
        quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_steps=4).fit(Failing(), rows)
    assert len(by_key(list(rows))) == len(LENGTHS)


@pytest.mark.parametrize("kind", [torchdata.StatefulDataLoader, DataLoader])
def test_a_search_for_the_learning_rate_takes_no_rows_away(
    kind: type[DataLoader[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def made() -> Any:
        return pack_loader(kind(Samples(LENGTHS), batch_size=4, collate_fn=collate), POLICY)

    def trainer(*more: Any) -> Any:
        return quiet_trainer(callbacks=[PackedAttention(monitor=False), *more], max_epochs=1)

    def module() -> Tiny:
        found = Tiny()
        found.lr = 0.1  # type: ignore[assignment]  # which the search needs
        return found

    whole, before, within, rows = module(), module(), module(), made()
    trainer().fit(whole, made())
    searching = trainer()
    Tuner(searching).lr_find(before, rows, num_training=3)
    assert len(before.seen) == 3
    searching.fit(before, rows)
    trainer(LearningRateFinder(num_training_steps=3)).fit(within, made())
    assert before.seen[3:] == within.seen[3:] == whole.seen
    assert len(whole.seen) > 3


def test_one_loader_for_training_and_validation_is_refused() -> None:
    class Validating(Tiny):
        def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
            # What is trained on is not known then, if it is another loader over the same data.
            assert self.trainer.sanity_checking
            assert other is not rows

    bare = stateful()
    rows = pack_loader(bare, POLICY)
    for other in (rows, pack_loader(bare, POLICY)):
        for checked in (0, 1):
            trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_epochs=1, num_sanity_val_steps=checked)
            with pytest.raises(
                ValueError, match="the validation data is read by the same loader as the train data of this fit"
            ):
                trainer.fit(Validating(), rows, other)


class Predicting(HuggingFaceModule):
    def predict_step(self, batch: PackedBatch, batch_idx: int) -> list[Any]:
        return unpack(batch.input_ids, batch)


def test_predictions_are_put_in_the_order_of_the_data() -> None:
    samples = Samples([n for n in LENGTHS if n > 1])
    bare = DataLoader(samples, batch_size=4, collate_fn=lambda each: pad(each, "left"))  # type: ignore[arg-type]
    for loader in (DataLoader(samples, batch_size=4, collate_fn=collate), bare):
        results: Any = quiet_trainer(callbacks=[PackedAttention()]).predict(Predicting(), pack_loader(loader, POLICY))
        came = [result.key for row in results for result in row]
        ordered = in_reading_order(results)
        assert came != [result.key for result in ordered]
        assert [result.values.tolist() for result in ordered] == [source.input_ids.tolist() for source in samples.sources]
        assert [result.key for result in in_reading_order(results, keys=came)] == came
    with pytest.raises(ValueError, match=r"1 sources are not among the \d+ keys, such as 'batch 0, row 0'"):
        in_reading_order(results, keys=[key for key in came if key != "batch 0, row 0"])
    with pytest.raises(ValueError, match=r"source 'a' has a key of its own, .*pass the keys in the order that is wanted"):
        in_reading_order([[SourceOutput("a", torch.ones(1))]])
    with pytest.raises(ValueError, match=f"source '{came[0]}' comes twice"):
        in_reading_order([*results, results[0]])


# --- predictions -------------------------------------------------------------------------------------------------------


def unlabelled(sources: list[EncodedSource]) -> dict[str, Any]:
    batch = collate(sources)
    del batch["labels"]
    return batch


class Logits(HuggingFaceModule):
    def predict_step(self, batch: Any, batch_idx: int) -> list[SourceOutput]:
        return unpack(self.model(**batch), batch)


@torch.no_grad()
def farthest_from_alone(module: HuggingFaceModule, results: list[SourceOutput], sources: list[EncodedSource]) -> float:
    """The largest difference between the logits of sources in rows and of each alone."""
    return max(
        (result.values - module.model(source.input_ids[None]).logits[0]).abs().max().item()
        for result, source in zip(results, sources, strict=True)
    )


def test_batches_of_every_form_need_no_labels_for_predict() -> None:
    sources = Samples([5, 1, 9, 7]).sources
    expected = {source.key: source.input_ids.tolist() for source in sources}
    named = [{"input_ids": source.input_ids.tolist(), "id": source.key} for source in sources]
    forms: dict[str, list[Any]] = {
        "padded": [unlabelled(sources[:2]), unlabelled(sources[2:])],
        "samples": [named[:2], named[2:]],
        # Labels do not have to be everywhere, nor to be targets.
        "mixed": [collate(sources[:2]), [*named[2:3], {**named[3], "labels": [IGNORE] * 7}]],
    }
    for name, batches in forms.items():
        rows = list(pack_loader(batches, POLICY, for_predict=True))
        assert by_key(rows) == expected, name
        assert not any(row.left_out for row in rows)
        labelled = sum(int(row.loss_mask.sum()) for row in rows)
        assert labelled == (sum((source.labels != IGNORE).sum() for source in sources[:2]) if name == "mixed" else 0), name
    flat = DataCollatorWithFlattening()([{"input_ids": source.input_ids.tolist()} for source in sources], return_tensors="pt")
    del flat["labels"]
    rows = list(pack_loader([flat], POLICY, for_predict=True))
    assert sorted(by_key(rows).values()) == sorted(expected.values())
    assert not any(row.loss_mask.any() for row in rows)


def test_predictions_without_labels_are_those_of_the_unpacked_model() -> None:
    samples = Samples([9, 5, 1, 7, 20, 3, 30, 11])
    loader = DataLoader(samples, batch_size=3, collate_fn=unlabelled)
    policy = PackingPolicy(24, algorithm="best_fit_decreasing", overlength="truncate", multiple=4)
    assert [len(source) > policy.capacity for source in samples.sources].count(True) == 1
    cut = [
        EncodedSource.of(source.key, source.input_ids[: policy.capacity].clone(), source.labels[: policy.capacity])
        for source in samples.sources
    ]
    told = "1 sources of batch . on rank 0 are left out of the prediction or cut, such as '6' .truncated, 6 tokens.;"
    ways: list[tuple[PackedAttention, Any]] = [
        (PackedAttention(), pack_loader(loader, policy, for_predict=True)),
        (PackedAttention(policy=policy), loader),
    ]
    for callback, data in ways:
        module = Logits()
        with pytest.warns(UserWarning, match=told):
            results: Any = quiet_trainer(callbacks=[callback]).predict(module, data)
        ordered = in_reading_order(results)
        assert [result.key for result in ordered] == [source.key for source in samples.sources]
        assert farthest_from_alone(module, ordered, cut) < 1e-10


def test_what_predict_loses_names_the_way_out() -> None:
    samples = Samples([9, 1, 7])
    loader = DataLoader(samples, batch_size=3, collate_fn=collate)
    for options, kept in (({}, ["0", "2"]), ({"for_predict": True}, ["0", "1", "2"])):
        trainer = quiet_trainer(callbacks=[PackedAttention()])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            results: Any = trainer.predict(Predicting(), pack_loader(loader, POLICY, **options))
        assert [result.key for result in in_reading_order(results)] == kept
        lost = [str(each.message) for each in told if "left out of the prediction" in str(each.message)]
        assert len(lost) == 3 - len(kept)
        assert all("'1' (no_targets, 1 tokens) (pack_loader(..., for_predict=True) leaves out" in each for each in lost)
    with pytest.raises(ValueError, match=r"there is no row in this pass over the loader.*batch 0, row 0 \(overlength\)"):
        list(pack_loader(Batches(lambda: pad(make_sources((30,)))), POLICY, for_predict=True))


def test_rows_for_predict_are_refused_where_targets_are_needed() -> None:
    loader = DataLoader(Samples([5, 9, 7, 12]), batch_size=2, collate_fn=unlabelled)
    rows = pack_loader(loader, POLICY, for_predict=True)
    with pytest.raises(CollatedBatchError, match=r"neither labels.*for trainer.predict, say pack_loader\(.*for_predict=True"):
        list(pack_loader(loader, POLICY))

    class Seeing(Predicting):
        def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
            seen.extend(batch.source_keys)

        test_step = validation_step

    seen: list[str] = []
    quiet = lambda **o: quiet_trainer(callbacks=[PackedAttention(monitor=False, **o)], max_epochs=1)  # noqa: E731
    with pytest.raises(
        ValueError, match=r"the train data is packed by pack_loader\(..., for_predict=True\), whose rows may have"
    ):
        quiet(evaluate_unlabelled=True).fit(Seeing(), rows)
    for stage in ("validate", "test"):
        name = {"validate": "validation", "test": "test"}[stage]
        with pytest.raises(ValueError, match=rf"the {name} data is packed.*If {name}_step needs no targets, say PackedAtt"):
            getattr(quiet(), stage)(Seeing(), rows, verbose=False)
        assert not seen
        getattr(quiet(evaluate_unlabelled=True), stage)(Seeing(), rows, verbose=False)
        assert sorted(seen) == ["0", "1", "2", "3"]
        seen.clear()


def test_several_loaders_are_refused_with_what_to_do() -> None:
    one, two = (DataLoader(Samples(LENGTHS), batch_size=4, collate_fn=collate) for _ in range(2))
    for several, kind in (
        ([one, two], "list"),
        ({"a": one, "b": two}, "dict"),
        (CombinedLoader([one, two], "max_size"), "CombinedLoader"),
    ):
        with pytest.raises(
            ValueError, match=f"takes one loader, and got a {kind} of 2: .*ConcatDataset.*give the Trainer a list"
        ):
            pack_loader(several, POLICY)  # type: ignore[arg-type]
    # That is what evaluation over several takes.
    seen: list[int] = []

    class Validating(Tiny):
        def validation_step(self, batch: PackedBatch, batch_idx: int, dataloader_idx: int) -> None:
            seen.append(dataloader_idx)

    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)])
    trainer.validate(Validating(), [pack_loader(each, POLICY) for each in (one, two)], verbose=False)
    assert set(seen) == {0, 1}


def test_a_policy_beside_pack_loader_is_the_same_or_refused() -> None:
    loader = DataLoader(Samples(LENGTHS), batch_size=4, collate_fn=collate)
    for policy in (POLICY, PackingPolicy(24, algorithm="best_fit_decreasing", multiple=2)):
        options: dict[str, Any] = {"callbacks": [PackedAttention(policy=policy, monitor=False)], "max_steps": 2}
        run = lambda options=options: quiet_trainer(**options).fit(Tiny(), pack_loader(loader, POLICY))  # noqa: E731
        if policy == POLICY:
            run()
            continue
        with pytest.raises(
            ValueError, match=r"the train data is packed by pack_loader.*not used then: multiple=2 and 1\. Leave the policy"
        ):
            run()


def test_a_loader_without_a_state_says_so_and_is_not_resumed(tmp_path: Path) -> None:
    plain = lambda **o: pack_loader(DataLoader(Samples(LENGTHS), batch_size=4, collate_fn=collate), POLICY, **o)  # noqa: E731
    with pytest.warns(
        UserWarning, match=r"checkpoints of this run hold no position in the data: pack_loader wraps a DataLoader"
    ):
        first = fit(tmp_path, plain(), steps=3)
    with pytest.raises(ResumeError, match=r"wraps a DataLoader, which has no state_dict.*StatefulDataLoader"):
        fit(tmp_path / "b", plain(), steps=5, resume=tmp_path / "step=3.ckpt")
    with pytest.warns(UserWarning, match=r"on_mismatch='restart': THE DATA STARTS OVER"):
        again = fit(tmp_path / "c", plain(on_mismatch="restart"), steps=5, resume=tmp_path / "step=3.ckpt")
    assert again.seen == first.seen[:2]


class Odd(DataLoader[Any]):
    """Its state holds what a checkpoint cannot."""

    def state_dict(self) -> dict[str, Any]:
        return {"worker": {"at": Path("x")}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("never asked")


def test_a_state_that_no_checkpoint_can_hold_is_named(tmp_path: Path) -> None:
    packed = pack_loader(Odd(Samples(LENGTHS), batch_size=4, collate_fn=collate), POLICY)
    with pytest.warns(
        UserWarning, match=r"wraps a Odd, of whose state_dict state.worker.at is a PosixPath, which a checkpoint"
    ):
        module = fit(tmp_path, packed, steps=3)
    assert len(module.seen) == 3


def test_a_module_of_another_loader_is_left_alone(tmp_path: Path) -> None:
    rows = list(pack_loader(DataLoader(Samples(LENGTHS), batch_size=4, collate_fn=collate), POLICY))
    module = Tiny(Batches(*(lambda row=row: row for row in rows)))
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_epochs=1)
    trainer.fit(module)
    assert len(module.seen) == len(rows)
    assert not any(isinstance(callback, LoaderProgress) for callback in trainer.callbacks)
    assert "train_dataloader" not in vars(module)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    fit(tmp_path, pack_loader(stateful(), PackingPolicy(24), window=3), steps=2)
    with pytest.raises(ResumeError, match=r"(?s)packing.capacity: 24 in the checkpoint, 32 now.*packing.window: 3.*4 now"):
        fit(tmp_path / "b", pack_loader(stateful(), PackingPolicy(32), window=4), steps=4, resume=tmp_path / "step=2.ckpt")


def test_losses_are_those_of_sources_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_double(monkeypatch)
    lengths = [length for part in PARTS for length in part]
    samples = Samples(lengths)
    loader = DataLoader(samples, batch_size=3, collate_fn=collate)
    rows = list(pack_loader(loader, PackingPolicy(16, algorithm="best_fit_decreasing")))
    assert len(rows) > 2
    module = HuggingFaceModule()
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_epochs=1, accumulate_grad_batches=len(rows))
    trainer.fit(module, pack_loader(loader, PackingPolicy(16, algorithm="best_fit_decreasing")))
    assert module.shapes == [[1, row.input_ids.shape[1]] for row in rows]
    expected = tiny_model("llama", dtype=torch.float64)
    parts = [alone_loss(expected, source) for source in samples.sources]
    torch.stack([loss for loss, _ in parts]).sum().div(sum(n for _, n in parts)).backward()
    torch.optim.SGD(expected.parameters(), lr=0.5).step()
    assert farthest(module.model, expected) < 1e-10


# --- ranks -------------------------------------------------------------------------------------------------------------


def a_rank(argument: dict[str, Any]) -> dict[str, Any]:
    """Uneven data on two ranks; what a rank trained on, and what it reports."""
    rank = int(os.environ["RANK"])
    seen: list[list[str]] = []
    gone: list[Any] = []

    class Noting(Tiny):
        def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
            seen.append(batch.source_keys)
            gone.extend(batch.left_out)
            return super().training_step(batch, batch_idx)

    options = {"max_epochs": 1, "devices": 2, "strategy": "ddp_find_unused_parameters_true"}
    lengths = LENGTHS[:20] if rank else LENGTHS
    own = DataLoader(Samples(lengths), batch_size=4, collate_fn=collate)
    quiet_trainer(callbacks=[PackedAttention(monitor=False)], **options).fit(Noting(), pack_loader(own, POLICY, sharded=True))
    uneven = {
        "rows": len(seen),
        "seen": [key for keys in seen for key in keys],
        "gone": [list(g) for g in gone],
        "count": len(lengths),
    }
    # Now the other rank has more than it may give.
    more = DataLoader(Samples(LENGTHS if rank else LENGTHS[:20]), batch_size=4, collate_fn=collate)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        predicting = quiet_trainer(callbacks=[PackedAttention(monitor=False)], **options)
        predicting.predict(Predicting(), pack_loader(more, POLICY, sharded=True))
    uneven["warned"] = [str(each.message) for each in told if "left out of the prediction" in str(each.message)]
    # Prompts, all of them on each of two ranks that have not equally many, or none.
    uneven["predicted"] = []
    for share in ([7, 3], [3, 0]):
        first = rank * share[0]
        mine = Samples(LENGTHS).sources[first : first + share[rank]]
        prompts = DataLoader(mine, batch_size=2, collate_fn=unlabelled)  # type: ignore[arg-type]
        module = Logits()
        trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], **options)
        results: Any = trainer.predict(module, pack_loader(prompts, POLICY, sharded=True, for_predict=True))
        ordered = in_reading_order(results)
        apart = farthest_from_alone(module, ordered, mine) if mine else 0.0
        uneven["predicted"].append({"rows": len(results), "keys": [r.key for r in ordered], "apart": apart})
    refusal = ""
    try:
        next(iter(pack_loader(own, POLICY)))
    except ValueError as e:
        refusal = str(e)
    # A sampler of their own, which is told the pass; and the run goes on from its middle on both.
    samples = Samples(LENGTHS)
    sampler = torchdata.StatefulDataLoader

    def loader() -> Any:
        each = DistributedSampler(samples, num_replicas=2, rank=rank, shuffle=True)
        return pack_loader(sampler(samples, batch_size=4, sampler=each, collate_fn=collate), POLICY)

    folder = Path(argument["folder"])
    runs = {"devices": 2, "strategy": "ddp_find_unused_parameters_true"}
    whole = fit(folder, loader(), steps=14, **runs)
    again = fit(folder / "again", loader(), steps=14, resume=folder / "step=5.ckpt", **runs)
    return {"uneven": uneven, "refusal": refusal, "whole": whole.seen, "again": again.seen}


def test_two_ranks_get_equally_many_rows_and_lose_nothing(tmp_path: Path) -> None:
    results = on_ranks("tests.test_pack_loader:a_rank", {"folder": str(tmp_path / "c")}, folder=tmp_path)
    first, second = (result["uneven"] for result in results)
    assert first["rows"] == second["rows"] > 3
    assert {reason for _, reason, _ in first["gone"]} == {"uneven_ranks"}
    for result in (first, second):
        told = [key for key, _, _ in result["gone"]]
        assert sorted(result["seen"] + told, key=int) == [str(i) for i in range(result["count"])]
    # By the rank that loses them.
    assert any("on rank 1 are left out" in text and "for_predict=True) leaves out" in text for text in second["warned"])
    for (one, two), split in zip(zip(first["predicted"], second["predicted"], strict=True), (7, 3), strict=True):
        # Blank rows of the one are beside the rows of the other.
        assert one["rows"] == two["rows"] > len(two["keys"])
        assert one["keys"] + two["keys"] == [str(i) for i in range(10 if split == 7 else 3)]
        assert max(one["apart"], two["apart"]) < 1e-10
    for result in results:
        assert "each of the 2 ranks would train on all of the data" in result["refusal"]
        assert len(result["whole"]) == 14
        assert result["again"] == result["whole"][5:]
    assert not set(results[0]["whole"]) & set(results[1]["whole"])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, "packs the batches of a loader, and got None: give it a DataLoader"),
        ([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}], r"batch 0 is a single sample, with input_ids \[3\].*collate_fn=list"),
        ([{"input_ids": torch.arange(4), "labels": torch.arange(4)}], r"a single sample, with input_ids \[4\]"),
    ],
)
def test_what_is_no_loader_of_batches_is_told(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        list(pack_loader(given, POLICY))


def test_loaders_without_a_row_are_refused() -> None:
    once = pack_loader((pad(make_sources((9, 5))) for _ in range(2)), POLICY)
    assert list(once)
    with pytest.raises(ValueError, match="there is no row in this pass over the loader: a generator can be read only once"):
        list(once)
    with pytest.raises(ValueError, match="no row in this pass over the loader: it gives no batches"):
        list(pack_loader([], POLICY))
    with pytest.raises(ValueError, match=r"raise the policy's capacity.*left out: batch 0, row 0 \(overlength\)"):
        list(pack_loader(Batches(lambda: pad(make_sources((30,)))), POLICY))
