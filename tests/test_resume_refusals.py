"""Which checkpoints a run does not go on from, what it says then, and how it starts the data over where it is told to."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pack import EnergonPackDataModule, PackingPolicy, ParallelLayout
from lightning_pack.datamodule import ResumeError
from lightning_pack.energon.fingerprint import STREAM_VERSION
from lightning_pack.energon.state import StateError
from lightning_pack.prepare.tokenizer import train_tokenizer
from lightning_pack.resume import (
    STATE_VERSION,
    different_settings,
    plain_settings,
    refuse_other_topology,
    refuse_redistribution,
)
from lightning_pack.topology import Topology
from tests.numbers_data import NumberEncoder, lengths, records_of, write_webdataset
from tests.ranks import on_ranks
from tests.training import Options, Recorder, datamodule, run, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


@pytest.fixture(scope="module")
def saved(numbers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run(Options(data=str(numbers), checkpoints=str(folder), trainer={"max_steps": 3}))
    return folder / "last.ckpt"


def one_shard_changed(numbers: Path, folder: Path) -> str:
    """The data with one record of another value, in as many bytes."""
    shutil.copytree(numbers, folder / "other")
    shard = folder / "other" / "train-1.tar"
    shard.write_bytes(shard.read_bytes().replace(b'"id": 100}', b'"id": 199}', 1))
    return str(folder / "other")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"packing": PackingPolicy(capacity=32, buffer_size=16, multiple=4)}, "packing.capacity: 64 in the checkpoint, 32 now"),
        (
            {"packing": PackingPolicy(capacity=64, buffer_size=8, multiple=4)},
            "packing.buffer_size: 16 in the checkpoint, 8 now",
        ),
        ({"packing": PackingPolicy(capacity=64, buffer_size=16)}, "packing.multiple: 4 in the checkpoint, 1 now"),
        (
            {"packing": PackingPolicy(capacity=64, buffer_size=16, multiple=4, algorithm="first_fit_decreasing")},
            "packing.algorithm: 'exact_fill' in the checkpoint, 'first_fit_decreasing' now",
        ),
        ({"parallel": ParallelLayout(context=4)}, "packing.multiple: 4 in the checkpoint, 8 now"),
        ({"encoder": NumberEncoder(salt=1)}, "encoder.salt: 0 in the checkpoint, 1 now"),
        ({"seed": 5}, "seed: 0 in the checkpoint, 5 now"),
        ({"num_workers": 2}, "num_workers: 0 in the checkpoint, 2 now"),
        ({"epochs": 2}, "epochs: None in the checkpoint, 2 now"),
        ({"shuffle_buffer_size": 0}, "shuffle_buffer_size: 8 in the checkpoint, 0 now"),
        ({"shuffle_buffer_size": 9}, "shuffle_buffer_size: 8 in the checkpoint, 9 now"),
        ({"max_samples_per_sequence": None}, "max_samples_per_sequence: 10 in the checkpoint, None now"),
        ({"packs_per_batch": 2}, "packs_per_batch: 1 in the checkpoint, 2 now"),
        ({"path": one_shard_changed}, "data: train-1.tar has content "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_changed_setting_is_refused_with_both_values(
    numbers: Path, tmp_path: Path, saved: Path, change: dict[str, Any], line: str
) -> None:
    settings: dict[str, Any] = {
        "path": str(numbers),
        "encoder": NumberEncoder(),
        "packing": PackingPolicy(capacity=64, buffer_size=16, multiple=4),
        "num_workers": 0,
        "shuffle_buffer_size": 8,
        "max_samples_per_sequence": 10,
    } | change
    path = settings.pop("path")
    data = EnergonPackDataModule(path(numbers, tmp_path) if callable(path) else path, **settings)
    state = torch.load(saved, weights_only=True)["EnergonPackDataModule"]
    data.setup("fit")
    with pytest.raises(ResumeError, match="cannot continue exactly") as refusal:
        data.load_state_dict(state)
    assert line in str(refusal.value)
    assert str(refusal.value).count(" in the checkpoint, ") == 1, "only what differs is named"
    assert "Set them back to resume" in str(refusal.value)


def test_another_tokenizer_or_template_is_refused(tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]} for i in range(20)
    ]
    path = write_webdataset(tmp_path / "chats", {"train": records})
    texts = [f"question {i} answer {i}" for i in range(100)]
    first = train_tokenizer(texts, vocab_size=300)
    state = None
    changed = train_tokenizer(texts, vocab_size=290)
    template = train_tokenizer(texts, vocab_size=300)
    template.chat_template = template.chat_template.replace("<|im_start|>", "<|im_start|> ")
    same = train_tokenizer(texts, vocab_size=300)
    for tokenizer, names in ((first, []), (same, []), (changed, ["backend", "vocab_size"]), (template, ["template"])):
        data = EnergonPackDataModule(
            path, tokenizer=tokenizer, packing=PackingPolicy(capacity=64, buffer_size=4), num_workers=0
        )
        data.setup("fit")
        if state is None:
            next(iter(data.train_dataloader()))
            data._stream.progress.count_batch()
            state = data.state_dict()
        elif not names:
            data.load_state_dict(state)
        else:
            with pytest.raises(ResumeError, match=r"encoder\.") as refusal:
                data.load_state_dict(state)
            lines = [line for line in str(refusal.value).splitlines() if " in the checkpoint, " in line]
            assert lines
            assert all(any(name in line for name in names) for line in lines), lines


def test_the_refusal_reaches_the_user_through_the_trainer(numbers: Path, saved: Path) -> None:
    with pytest.raises(ResumeError, match=r"packing\.capacity: 64 in the checkpoint, 32 now"):
        run(Options(data=str(numbers), policy={"capacity": 32}, resume=str(saved), trainer={"max_steps": 5}))


def test_a_folder_that_moved_is_the_same_data(tmp_path: Path) -> None:
    records = records_of(lengths(60, most=40))
    here = write_webdataset(tmp_path / "here", {"train": records})
    base: dict[str, Any] = {"checkpoints": str(tmp_path / "c"), "trainer": {"max_steps": 6}}
    whole = run(Options(data=str(here), **base))
    there = here.rename(tmp_path / "there")
    resumed = run(Options(data=str(there), resume=str(tmp_path / "c" / "step=3.ckpt"), trainer={"max_steps": 6}))
    assert len(resumed.trained) == 3
    assert resumed.trained.items() <= whole.trained.items()


def test_a_checkpoint_without_a_position_is_refused(numbers: Path, saved: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(saved, weights_only=True)
    del checkpoint["EnergonPackDataModule"]
    torch.save(checkpoint, tmp_path / "foreign.ckpt")
    with pytest.raises(ResumeError, match=r"holds no position in the data for EnergonPackDataModule"):
        run(Options(data=str(numbers), resume=str(tmp_path / "foreign.ckpt"), trainer={"max_steps": 5}))


def test_validating_a_checkpoint_does_not_move_a_later_fit(numbers: Path, saved: Path) -> None:
    options = Options(data=str(numbers), trainer={"max_steps": 3, "limit_val_batches": 2})
    data, module, run_it = datamodule(options), Recorder(), trainer(options)
    run_it.validate(module, data, ckpt_path=str(saved), verbose=False)
    assert module.validated[-1]
    run_it.fit(module, data)
    assert module.trained == run(Options(data=str(numbers), trainer={"max_steps": 3})).trained


def test_testing_a_checkpoint_of_other_settings_does_not_move_a_later_fit(numbers: Path, saved: Path) -> None:
    options = Options(data=str(numbers), policy={"capacity": 40}, trainer={"max_steps": 3, "limit_val_batches": 2})
    data, module, run_it = datamodule(options), Recorder(), trainer(options)
    run_it.validate(module, data, ckpt_path=str(saved), verbose=False)
    assert module.validated[-1]
    run_it.fit(module, data)
    assert module.trained == run(options).trained
    # And a fit that goes on from a checkpoint is not moved by a validation of another one.
    resumed, data = Recorder(), datamodule(Options(data=str(numbers)))
    one = trainer(Options(data=str(numbers), trainer={"max_steps": 5, "limit_val_batches": 2}))
    one.validate(resumed, data, ckpt_path=str(saved.parent / "step=1.ckpt"), verbose=False)
    one.fit(resumed, data, ckpt_path=str(saved))
    assert (
        list(resumed.trained.values()) == list(run(Options(data=str(numbers), trainer={"max_steps": 5})).trained.values())[3:]
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("megatron-energon", "megatron-energon: '7.0' in the checkpoint, '"),
        ("torch's random order", "torch's random order: '7.0' in the checkpoint, '"),
        ("lightning-pack's stream", f"lightning-pack's stream: '7.0' in the checkpoint, {STREAM_VERSION} now"),
    ],
)
def test_libraries_that_would_give_other_batches_are_refused(numbers: Path, saved: Path, name: str, line: str) -> None:
    data = datamodule(Options(data=str(numbers)))
    data.setup("fit")
    state = torch.load(saved, weights_only=True)["EnergonPackDataModule"]
    assert state["settings"][name] != "7.0"
    state["settings"][name] = "7.0"
    with pytest.raises(ResumeError, match="cannot continue exactly") as refusal:
        data.load_state_dict(state)
    assert line in str(refusal.value)
    assert str(refusal.value).count(" in the checkpoint, ") == 1


def test_the_size_of_the_settings_stays_small(saved: Path) -> None:
    settings = torch.load(saved, weights_only=True)["EnergonPackDataModule"]["settings"]
    assert len(settings["data.files"]) == 3
    assert len(repr(settings)) < 3000


def test_a_worker_may_take_over_from_the_main_process_and_back(numbers: Path, saved: Path, tmp_path: Path) -> None:
    whole = run(Options(data=str(numbers), trainer={"max_steps": 9}))
    there = Options(data=str(numbers), workers=1, resume=str(saved), checkpoints=str(tmp_path), trainer={"max_steps": 6})
    resumed = run(there)
    back = run(Options(data=str(numbers), resume=str(tmp_path / "last.ckpt"), trainer={"max_steps": 9}))
    assert list(whole.trained) == [(0, i) for i in range(9)]
    assert list(resumed.trained) == [(0, i) for i in range(3, 6)]
    assert list(back.trained) == [(0, i) for i in range(6, 9)]
    assert (resumed.trained | back.trained).items() <= whole.trained.items()


def test_several_differences_are_listed_with_the_topology(numbers: Path, saved: Path) -> None:
    data = datamodule(Options(data=str(numbers), workers=2, policy={"capacity": 32}))
    data.setup("fit")
    with pytest.raises(ResumeError) as refusal:
        data.load_state_dict(torch.load(saved, weights_only=True)["EnergonPackDataModule"])
    lines = str(refusal.value).splitlines()
    assert "  packing.capacity: 64 in the checkpoint, 32 now" in lines
    assert "  num_workers: 0 in the checkpoint, 2 now" in lines
    assert "  (the data was dealt out to 1 stream and would be to 2; legal: 1 rank x 1 worker or 0)" in lines


def test_long_values_are_cut_to_where_they_differ() -> None:
    one, other = (list(range(500)) for _ in range(2))
    other[300] = -1
    (line,) = different_settings({"x": one, "same": 1}, {"x": other, "same": 1})
    assert len(line) < 400
    assert line.startswith("  x: ...")
    assert "300, 301" in line
    assert "-1, 301" in line
    assert line.count("characters)") == 2
    many = [f"{i}.tar: samples 1, bytes 2, ends aa" for i in range(50)]
    lines = different_settings({"data.files": many}, {"data.files": [line.replace("aa", "bb") for line in many]})
    assert lines[0] == "  data: 0.tar has content aa in the checkpoint, content bb now"
    assert lines[8:] == ["  data: and 42 more files"]


class Odd(NumberEncoder):
    def fingerprint(self) -> dict[str, Any]:
        return {"type": "Odd", "value": {1, 2}}


def test_a_fingerprint_that_no_checkpoint_can_hold_is_refused_at_once(numbers: Path) -> None:
    with pytest.raises(ValueError, match=r"the setting encoder\.value is a set .*must consist of dicts, lists, numbers and"):
        EnergonPackDataModule(numbers, encoder=Odd()).setup("fit")
    shared = [1]
    kept = plain_settings({"a": {"b": shared}, "c": shared})
    assert kept == {"a.b": [1], "c": [1]}
    assert kept["a.b"] is not kept["c"]


def test_topologies_of_the_same_product_are_legal() -> None:
    assert refuse_other_topology(Topology(2, 3), Topology(2, 3)) == "same"
    for ranks, workers in ((1, 4), (4, 1), (4, 0)):
        assert refuse_other_topology(Topology(2, 2), Topology(ranks, workers)) == "redistribute"
    assert refuse_other_topology(Topology(1, 0), Topology(1, 1)) == "redistribute"
    with pytest.raises(ResumeError) as refusal:
        refuse_other_topology(Topology(2, 2), Topology(3, 2))
    assert str(refusal.value) == (
        "  data-parallel ranks: 2 in the checkpoint, 3 now\n"
        "  (the data was dealt out to 4 streams and would be to 6; "
        "legal: 1 rank x 4 workers, 2 ranks x 2 workers, 4 ranks x 1 worker or 0)"
    )
    with pytest.raises(
        ResumeError, match=r"data-parallel ranks: 2 in the checkpoint, 4 now(?s:.*)only an endless stream can be spread anew"
    ):
        refuse_redistribution(Topology(2, 2), Topology(4, 1))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 40), st.integers(0, 9))
def test_a_topology_is_legal_if_it_is_listed(ranks: int, workers: int, other_ranks: int, other_workers: int) -> None:
    saved, now = Topology(ranks, workers), Topology(other_ranks, other_workers)
    named = f"{now.ranks} rank{'s' * (now.ranks > 1)} x {max(now.workers, 1)} worker{'s' * (now.workers > 1)}"
    listed = [words.removesuffix(" or 0") == named for words in saved.legal()]
    try:
        refuse_other_topology(saved, now)
    except ResumeError:
        assert not any(listed)
    else:
        assert any(listed)


# Starting the data over.


class Renamed(EnergonPackDataModule):
    """Keeps its position under its own name."""


class Resumed(Recorder):
    """Notes the weights and the step that it starts from."""

    def on_train_start(self) -> None:
        self.start = (self.global_step, self.weights())


def starting_over(options: Options, checkpoint: Path, *, on_mismatch: str, kind: type = EnergonPackDataModule) -> Resumed:
    data = kind(
        options.data,
        encoder=NumberEncoder(),
        packing=PackingPolicy(**{"capacity": 64, "buffer_size": 16, "multiple": 4} | options.policy),
        num_workers=options.workers,
        shuffle_buffer_size=8,
        max_samples_per_sequence=10,
        on_mismatch=on_mismatch,
    )
    module = Resumed()
    trainer(options).fit(module, data, ckpt_path=str(checkpoint))
    return module


def without(checkpoint: dict[str, Any]) -> None:
    del checkpoint["EnergonPackDataModule"]


def emptied(checkpoint: dict[str, Any]) -> None:
    checkpoint["EnergonPackDataModule"] = {}


def none(checkpoint: dict[str, Any]) -> None:
    checkpoint["EnergonPackDataModule"] = None


def other_version(checkpoint: dict[str, Any]) -> None:
    checkpoint["EnergonPackDataModule"]["version"] = STATE_VERSION + 1


def damaged(checkpoint: dict[str, Any]) -> None:
    checkpoint["EnergonPackDataModule"]["ranks"][0]["loader"]["epoch"] = -1


def untouched(checkpoint: dict[str, Any]) -> None:
    """Leave it."""


@pytest.mark.parametrize(
    ("change", "settings", "reason"),
    [
        (untouched, {"policy": {"capacity": 40}}, r"packing\.capacity: 64 in the checkpoint, 40 now"),
        (untouched, {"workers": 2}, r"num_workers: 0 in the checkpoint, 2 now"),
        (untouched, {"workers": 3}, r"num_workers: 0 in the checkpoint, 3 now"),
        (untouched, {"kind": Renamed}, r"holds no position in the data for Renamed: .*or by a subclass of this one"),
        (without, {}, r"holds no position in the data for EnergonPackDataModule: it was saved by another datamodule"),
        (emptied, {}, r"data position is empty: the checkpoint was not saved while training"),
        (none, {}, r"data position is empty: the checkpoint was not saved while training"),
        (other_version, {}, rf"has version {STATE_VERSION + 1}, this package reads version {STATE_VERSION}: resume with the"),
        (damaged, {}, r"ranks\[0\]\.loader\.epoch: -1 is not a whole number from 0 to 0"),
    ],
    ids=lambda value: getattr(value, "__name__", "") if callable(value) else str(value)[:20],
)
def test_the_data_starts_over_only_where_that_is_asked_for(
    numbers: Path, saved: Path, tmp_path: Path, change: Any, settings: dict[str, Any], reason: str
) -> None:
    checkpoint = torch.load(saved, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, tmp_path / "changed.ckpt")
    kind = settings.get("kind", EnergonPackDataModule)
    base: dict[str, Any] = {"data": str(numbers), **{name: value for name, value in settings.items() if name != "kind"}}
    options = Options(**base, checkpoints=str(tmp_path / "on"), trainer={"max_steps": 6})
    with pytest.raises((ResumeError, StateError), match=reason):
        starting_over(options, tmp_path / "changed.ckpt", on_mismatch="error", kind=kind)
    with pytest.warns(UserWarning, match=rf"(?s)THE DATA STARTS OVER from its beginning.*The reason: .*{reason}") as seen:
        module = starting_over(options, tmp_path / "changed.ckpt", on_mismatch="restart", kind=kind)
    assert sum("STARTS OVER" in str(warning.message) for warning in seen) == 1
    fresh = list(run(Options(**base, trainer={"max_steps": 6})).trained.values())
    assert list(module.trained.values()) == fresh[:3]
    # The weights and the step go on.
    trained = torch.cat([p.flatten() for p in checkpoint["state_dict"].values()]).tolist()
    assert module.start == (3, trained)
    # What is saved from then on resumes like any other checkpoint, and counts anew.
    saved_on = torch.load(tmp_path / "on" / "step=5.ckpt", weights_only=True)[kind.__qualname__]
    assert saved_on["ranks"][0]["counts"]["rows"] == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", "Be aware that when using|.*does not have many workers|Checkpoint directory|.*LeafSpec"
        )
        warnings.filterwarnings("ignore", ".*dataloader is not resumable")
        again = starting_over(options, tmp_path / "on" / "step=5.ckpt", on_mismatch="restart", kind=kind)
    assert list(again.trained.values()) == fresh[2:3]


def test_a_good_checkpoint_is_resumed_where_restarting_is_allowed(numbers: Path, saved: Path) -> None:
    module = starting_over(Options(data=str(numbers), trainer={"max_steps": 5}), saved, on_mismatch="restart")
    assert list(module.trained.values()) == list(run(Options(data=str(numbers), trainer={"max_steps": 5})).trained.values())[3:]


def test_the_data_starts_over_once_and_not_with_every_new_loader(numbers: Path, saved: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(saved, weights_only=True)
    without(checkpoint)
    torch.save(checkpoint, tmp_path / "changed.ckpt")
    options = Options(
        data=str(numbers), trainer={"max_steps": 7, "limit_train_batches": 2, "reload_dataloaders_every_n_epochs": 1}
    )
    with pytest.warns(UserWarning, match="STARTS OVER"):
        module = starting_over(options, tmp_path / "changed.ckpt", on_mismatch="restart")
    whole = run(Options(data=str(numbers), trainer={"max_steps": 7}))
    assert len(module.trained) == 4
    assert list(module.trained.values()) == list(whole.trained.values())[:4]


def test_only_the_known_answers_to_a_mismatch(numbers: Path) -> None:
    with pytest.raises(ValueError, match="on_mismatch='ignore' is not one of 'error', 'restart'"):
        EnergonPackDataModule(numbers, on_mismatch="ignore")  # type: ignore[arg-type]


def test_a_trainer_that_fits_again_says_that_other_data_starts_over(numbers: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    shutil.copytree(numbers, here)
    options = Options(data=str(here), trainer={"max_steps": 3})
    run_it, module, data = trainer(options), Recorder(), datamodule(options)
    run_it.fit(module, data)
    shutil.rmtree(here)
    one_shard_changed(numbers, tmp_path)
    (tmp_path / "other").rename(here)
    run_it.fit_loop.epoch_loop.max_steps = 6
    with pytest.warns(UserWarning, match="(?s)the data starts over .* changed since the last fit.*train-1.tar has content"):
        run_it.fit(module, data)
    assert len(module.trained) == 6
    assert list(module.trained.values())[3:] == list(run(Options(data=str(here), trainer={"max_steps": 3})).trained.values())


# On two ranks.


def on_two(argument: dict[str, Any]) -> dict[str, Any]:
    """Resume from a checkpoint in which only the position of rank 1 is damaged."""
    base: dict[str, Any] = {"data": argument["data"], "trainer": {"devices": 2, "strategy": "ddp"}}
    folder = Path(argument["folder"])
    whole = run(Options(**base | {"checkpoints": str(folder), "trainer": base["trainer"] | {"max_steps": 3}}))
    torch.distributed.barrier()
    # Each rank makes its own copy of the file.
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    checkpoint["EnergonPackDataModule"]["ranks"][1]["loader"]["workers"][0]["at"]["buffer"] = -1
    changed = folder / f"changed{torch.distributed.get_rank()}.ckpt"
    torch.save(checkpoint, changed)
    options = Options(**base | {"trainer": base["trainer"] | {"max_steps": 5}})
    try:
        starting_over(options, changed, on_mismatch="error")
    except StateError as e:
        refusal = str(e)
    module = starting_over(options, changed, on_mismatch="restart")
    return {"refusal": refusal, "whole": list(whole.trained.values()), "over": list(module.trained.values())}


@pytest.mark.slow
def test_ranks_refuse_and_start_over_together(numbers: Path, tmp_path: Path) -> None:
    argument = {"data": str(numbers), "folder": str(tmp_path / "checkpoints")}
    results = on_ranks("tests.test_resume_refusals:on_two", argument, folder=tmp_path)
    assert results[0]["whole"] != results[1]["whole"]
    for result in results:
        assert "ranks[1].loader.workers[0].at.buffer: -1 is not a whole number" in result["refusal"]
        assert len(result["over"]) == 2
        assert result["over"] == result["whole"][:2]
