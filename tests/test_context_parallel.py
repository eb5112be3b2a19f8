"""Rows over several context-parallel ranks, each a real process with gloo, against rows on one."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from transformers import AutoConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

from lightning_pack import ContextSlice, PackedAttention, ParallelLayout
from lightning_pack.attention import ContextGroup, SegmentsBackend, TransformerEngineBackend, VarlenBackend
from lightning_pack.attention.context_places import ContextPlaces
from lightning_pack.callbacks.context import ContextParallel, RowCutter
from lightning_pack.module import PackedCausalLM
from tests.context_ranks import MODELS, row_of, stand_ins
from tests.context_training import Own, PlainModule, Run, users_own
from tests.ranks import on_ranks
from tests.tiny_models import largest_difference, quiet_trainer, tiny_config

Results = list[dict[str, Any]]
#: Lightning's word to whoever has both.
OWN_HOOK = pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer` in `LightningModule`")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("context")


def results_of(name: str, ranks: int, *, numbers: Path, folder: Path) -> Results:
    argument = {"data": str(numbers), "folder": str(folder)}
    on_ranks(f"tests.context_training:{name}", argument, folder=folder / name, ranks=ranks)
    return [torch.load(folder / f"{name}.{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.fixture(scope="module")
def pair(numbers: Path, folder: Path) -> Results:
    """What two ranks found."""
    return results_of("pair", 2, numbers=numbers, folder=folder)


@pytest.fixture(scope="module")
def four(numbers: Path, folder: Path) -> Results:
    """What four ranks found."""
    return results_of("four", 4, numbers=numbers, folder=folder)


@pytest.fixture(scope="module")
def whole(numbers: Path) -> dict[str, Any]:
    """The run on one rank, nothing cut."""
    return Run(data=str(numbers), layout={}).results(devices=1)


# --- attention and models --------------------------------------------------------------------------------------------------


def check_attention(results: Results) -> None:
    for rank in results:
        assert len(rank["attention"]) == 3 * 3 + 1
        assert max(rank["attention"].values()) < 1e-12, rank["attention"]


def check_models(results: Results, names: tuple[str, ...]) -> None:
    for rank in results:
        assert tuple(rank["models"]) == names
        for name, (loss, gradients, _, size) in rank["models"].items():
            assert size > 0.1
            assert max(loss, gradients) < 1e-12, name
    # A rank without any target.
    assert [rank["models"]["llama prompt"][2] for rank in results] == [2] + [0] * (len(results) - 1)


def test_two_ranks_compute_the_full_row(pair: Results) -> None:
    check_attention(pair)
    check_models(pair, MODELS)


def test_four_ranks_compute_the_full_row(four: Results) -> None:
    check_attention(four)
    check_models(four, ("mistral", "llama prompt"))


def test_a_compiler_leaves_attention_over_ranks_alone(pair: Results) -> None:
    for rank in pair:
        difference, graphs = rank["compiled"]
        assert difference < 1e-12
        assert graphs > 1


def test_what_is_not_right_over_ranks_is_refused_by_name(pair: Results) -> None:
    for rank in pair:
        found = rank["refusals"]
        assert "a source of 12 tokens is spread over 2 context-parallel ranks, and beyond 8 tokens" in found["dynamic"]
        assert "set the capacity to 8, or context=1" in found["dynamic"]
        assert "the last boundary is 20 but the row has 40 tokens" in found["full"]
        assert "only causal ones without gaps are cut" in found["bidirectional"]
        assert "'a2a' needs version 2.10" in found["te 2.9"]
        assert "window of 4 tokens over 3 context-parallel ranks with TransformerEngine 2.17: 'a2a'" in found["te 2.17"]
        assert "heads that 3 divides (4 of queries, 2 of keys), 'all_gather' needs version 2.18" in found["te 2.17"]
        for version in ("2.9", "2.17"):
            assert found[f"te {version} call"] == (
                f"BackendError: backend 'te' does not compute {found[f'te {version}']}; use PackedAttention(backend="
                "'segments'), which computes it, or backend='auto', which then chooses that"
            )
        assert found["te 2.10"] == found["te 2.18"] == ""
        assert "has 2 tensor-parallel ranks and the layout has tensor=1" in found["mesh"]


def test_ranks_of_a_row_with_rows_of_their_own_are_refused(pair: Results) -> None:
    for rank in pair:
        message = rank["dealt out"][True]
        assert "ranks 0, 1 share a row, and their loaders gave them different ones (of 24, 24 tokens, which begin" in message
        # Of equal boundaries, so that nothing else would have failed.
        assert len(set(re.findall(r"'(s\d\.0)'", message))) == 2
        assert "Trainer(use_distributed_sampler=False), since Lightning deals a DataLoader out" in message
        assert rank["dealt out"][False] == "4 steps"


# --- training --------------------------------------------------------------------------------------------------------------


def check_run(run: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-12, *, evaluation: bool = True) -> None:
    """Rows, weights, losses and counts of a run of which one is the other cut, to a tolerance."""
    steps = len(run["keys"])
    assert run["keys"] == expected["keys"][-steps:]
    assert largest_difference(run["weights"], expected["weights"]) < tolerance
    assert max(abs(a - b) for a, b in zip(run["losses"], expected["losses"][-steps:], strict=True)) < tolerance
    assert abs(run["val_loss"] - expected["val_loss"]) < 1e-6
    assert run["counts"]["train"] == expected["counts"]["train"]
    assert run["logged"].keys() == expected["logged"].keys()
    if evaluation:
        assert run["counts"] == expected["counts"]
        assert run["logged"] == expected["logged"]


def test_two_ranks_train_as_one_does(pair: Results, whole: dict[str, Any]) -> None:
    assert len(whole["keys"]) == 3
    assert whole["parts"] == [None] * 3
    assert whole["logged"]["packing/rank_imbalance"] == 1
    assert whole["counts"]["train"].sources == sum(map(len, whole["keys"]))
    for number, rank in enumerate(pair):
        assert rank["context"]["parts"] == [(number, 2)] * 3
        check_run(rank["context"], whole)
        check_run(rank["sharded"], whole, 1e-5)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_run_goes_on_cut_or_not(pair: Results, whole: dict[str, Any], numbers: Path, folder: Path) -> None:
    path = str(folder / "checkpoints" / "step=2.ckpt")
    assert len(torch.load(path, weights_only=True)["EnergonPackDataModule"]["ranks"]) == 1
    for rank in pair:
        assert len(rank["resumed"]["keys"]) == 1
        check_run(rank["resumed"], whole)
    check_run(Run(data=str(numbers), layout={}, resume=path).results(devices=1), whole)


def test_transformer_engine_trains_cut_and_evaluates_whole_rows(pair: Results, numbers: Path) -> None:
    expected = Run(data=str(numbers), layout={}, model_type="mistral").results(devices=1)
    for number, rank in enumerate(pair):
        assert rank["te"]["parts"] == [(number, 2)] * 3
        # With eval_context=1 each rank packs and evaluates its own half of the data.
        check_run(rank["te"], expected, evaluation=False)
        counts, all_counts = rank["te"]["counts"]["validation"], expected["counts"]["validation"]
        assert counts.packs > all_counts.packs
        for name in ("sources", "real_tokens", "target_tokens"):
            assert getattr(counts, name) == getattr(all_counts, name) > 0


@OWN_HOOK
def test_a_module_and_a_datamodule_of_ones_own(pair: Results) -> None:
    expected = users_own(ParallelLayout(), devices=1)
    assert [rank["own"]["targets"] for rank in pair] == [[2, 5], [0, 10]]
    assert expected["targets"] == [2, 15]
    for rank in pair:
        assert largest_difference(rank["own"]["gradients"], expected["gradients"]) < 1e-12


def test_four_ranks_are_two_that_share_nothing(pair: Results, four: Results) -> None:
    assert pair[0]["unsliced"]["keys"] != pair[1]["unsliced"]["keys"]
    assert [rank["data"]["parts"][0] for rank in four] == [(0, 2), (1, 2)] * 2
    for number, rank in enumerate(four):
        check_run(rank["data"], pair[number // 2]["unsliced"])


def test_tensor_parallel_ranks_get_the_same_part_and_count_once(four: Results, whole: dict[str, Any]) -> None:
    assert [rank["tensor"]["parts"][0] for rank in four] == [(0, 2)] * 2 + [(1, 2)] * 2
    for rank in four:
        check_run(rank["tensor"], whole)


# --- in one process --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [2, 3])
def test_rotary_frequencies_of_a_part_are_those_of_the_full_row(context: int) -> None:
    layout = ParallelLayout(context=context)
    row = row_of((13, 1, 9), layout)
    row.position_ids = torch.stack([row.position_ids, *(row.position_ids + 10 * axis for axis in (1, 2, 3))])
    config = AutoConfig.for_model(
        "qwen2_vl_text",
        hidden_size=32,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    )
    rotary, values = Qwen2VLRotaryEmbedding(config), torch.zeros(1, dtype=torch.float64)
    full = rotary(values, row.position_ids[1:])
    for rank in range(context):
        part = ContextSlice.of(row, layout=layout, rank=rank)
        assert part.position_ids.shape == (4, 1, row.width // context)
        assert not torch.equal(part.position_ids[0, 0], torch.arange(part.input_ids.shape[1]))
        for mine, all_of_it in zip(rotary(values, part.position_ids[1:]), full, strict=True):
            assert torch.equal(mine, all_of_it[:, part.indices] if mine.dim() == 3 else all_of_it[:, :, part.indices])


@pytest.mark.parametrize("context", [2, 3, 4])
def test_places_are_those_of_the_slices(context: int) -> None:
    layout = ParallelLayout(context=context)
    row = row_of((13, 1, 9, 22), layout, width="fixed", max_sources=6, fixed_boundaries=True)
    cu = row.cu_seqlens_padded
    assert len(cu) == 7
    assert cu[-1] == cu[-2] == row.width
    slices = layout.context_slices(cu, width=row.width)
    for rank, held in enumerate(slices):
        chunks = (rank, 2 * context - 1 - rank)
        places = ContextPlaces(cu, width=row.width, max_seqlen=row.max_seqlen, chunks=chunks, size=context)
        assert torch.equal(slices.flatten()[places.gathered], torch.arange(row.width))
        assert torch.equal(torch.cat([chunk.queries for chunk in places.chunks])[places.back], torch.arange(len(held)))
        for chunk in places.chunks:
            assert chunk.max_seqlen_q == chunk.cu_seqlens_q.diff().max()
            assert chunk.max_seqlen_k == chunk.cu_seqlens_k.diff().max()
            queries, keys = held[chunk.queries], slices.flatten()[chunk.keys]
            for source in range(4):
                mine = queries[chunk.cu_seqlens_q[source] : chunk.cu_seqlens_q[source + 1]]
                seen = keys[chunk.cu_seqlens_k[source] : chunk.cu_seqlens_k[source + 1]]
                assert seen.tolist() == list(range(int(cu[source]), int(mine[-1]) + 1))
    with pytest.raises(RuntimeError, match=f"end with a row of {2 * row.width} tokens over {context} context-parallel ranks"):
        ContextPlaces(cu, width=2 * row.width, max_seqlen=row.max_seqlen, chunks=(0, 1), size=context)


def test_a_slice_is_a_batch_that_counts_as_its_row() -> None:
    layout = ParallelLayout(context=2)
    row = row_of((13, 1, 9), layout)
    parts = [ContextSlice.of(row, layout=layout, rank=rank) for rank in range(2)]
    assert sum(int(part.loss_mask.sum()) for part in parts) == parts[0].target_tokens() == row.target_tokens() > 0
    moved = parts[1].to("cpu")
    assert (type(moved), moved.rank, moved.width, moved.source_keys) == (ContextSlice, 1, row.width, row.source_keys)
    assert repr(moved).startswith(f"ContextSlice(rank 1 of 2, {row.width // 2} tokens of PackedBatch(3 sources, 23 real")
    assert float(row.token_mean(torch.tensor(3.0))) == pytest.approx(3 / int(row.target_tokens()))
    with pytest.raises(ValueError, match="no process group to add up losses over: let PackedAttention cut the row"):
        moved.token_mean(torch.tensor(3.0))
    with pytest.raises(ValueError, match="cut already, this is the part of rank 1 of 2"):
        ContextSlice.of(moved, layout=layout, rank=0)


def test_a_copied_model_stays_on_its_ranks_and_a_pickled_one_cannot() -> None:
    group = ContextGroup(rank=0, ranks=(0, 1), process_group=None)
    with stand_ins():
        for kind in (SegmentsBackend, VarlenBackend, TransformerEngineBackend):
            backend = kind()
            backend.context = group
            assert copy.deepcopy(backend).context is group
            with pytest.raises(TypeError, match=r"cannot be pickled, since its process group .* save its state_dict\(\)"):
                pickle.dumps(backend)


def test_ranks_are_numbered_with_tensor_parallelism_fastest() -> None:
    layout = ParallelLayout(tensor=2, context=3, eval_context=1)
    groups = layout.context_groups(world_size=12)
    assert groups == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert [layout.context_rank(rank) for group in groups for rank in group] == [0, 1, 2] * 4
    for group in groups:
        assert len({layout.data_parallel(rank, world_size=12) for rank in group}) == 1
    assert layout.evaluation == ParallelLayout(tensor=2)
    with pytest.raises(ValueError, match=r"8 processes cannot hold models of 6 devices \(tensor=2, context=3\)"):
        layout.context_groups(world_size=8)


def test_other_strategies_and_the_memory_probe_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ParallelLayout(context=2)
    # It does not run without its accelerator, so only its place in the trainer is taken.
    trainer: Any = quiet_trainer()
    trainer._accelerator_connector.strategy = object.__new__(FSDPStrategy)
    monkeypatch.setattr(type(trainer), "world_size", 2)
    monkeypatch.setattr(type(trainer), "global_rank", 0)
    with pytest.raises(
        ValueError, match=r"context=2, eval_context=2: .* DDPStrategy and ModelParallelStrategy only, and this is FSDPStrategy"
    ):
        ContextParallel(layout, trainer)
    with pytest.raises(ValueError, match=r"probe_memory=True with context=2, .* would leave the others waiting"):
        quiet_trainer(callbacks=[PackedAttention(probe_memory=True)], max_steps=1).fit(
            PlainModule(), datamodule=Own(layout, [])
        )


@OWN_HOOK
def test_a_part_that_was_cut_for_others_is_refused() -> None:
    layout = ParallelLayout(context=2)
    part = ContextSlice.of(row_of((13, 1), layout), layout=layout, rank=0)
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_epochs=1)
    with pytest.raises(ValueError, match="a row that is cut for 2 context-parallel ranks, and 1 share a row"):
        trainer.fit(Uncut(), datamodule=Own(ParallelLayout(), [part]))


class Uncut(PlainModule):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Hooked(Own):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, dataloader_idx]


@pytest.mark.parametrize("kind", [Own, Hooked])
def test_rows_are_cut_behind_the_hook_that_lightning_calls(kind: type[Own]) -> None:
    trainer: Any = quiet_trainer(max_steps=1)
    module, datamodule = PackedCausalLM(tiny_config("llama")), kind(ParallelLayout(), [])
    owner = datamodule if kind is Hooked else module
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, datamodule=datamodule)
    cutter = RowCutter(trainer, module, lambda batch: [*batch, "cut"])
    # Only Hooked has a hook of its own, so nothing else is chosen, and nothing is warned of, than without the cutter.
    assert is_overridden("on_before_batch_transfer", owner) == (kind is Hooked)
    assert module._on_before_batch_transfer(["row"], dataloader_idx=3) == ["row", *([3] if kind is Hooked else []), "cut"]
    # A second one, as of another callback, goes and leaves the first.
    RowCutter(trainer, module, lambda batch: [*batch, "again"]).remove()
    assert module._on_before_batch_transfer(["row"])[-1] == "cut"
    cutter.remove()
    assert "cut" not in module._on_before_batch_transfer(["row"])
    assert "on_before_batch_transfer" not in vars(owner)
