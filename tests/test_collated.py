"""A collator's batch as a packed row: every field against a row that is packed of its sources alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BatchEncoding, DataCollatorWithFlattening

from lightning_pack import BatchFields, CollatedBatchError, PackedBatch, PackingPolicy, pack_loader, packed_row, unpack
from lightning_pack.collated import CollatedRow, pack_collated
from lightning_pack.collated.extent import extents
from lightning_pack.collated.fields import contents_of
from lightning_pack.collated.packer import BatchPacker
from lightning_pack.overlength import OverlengthError
from lightning_pack.source import IGNORE, EncodedSource
from tests.padded_batches import Side, pad
from tests.tiny_models import make_sources

LENGTHS = (7, 3, 12, 5, 9)
POLICY = PackingPolicy(16)
TENSORS = ("input_ids", "labels", "shift_labels", "loss_mask", "position_ids", "segment_ids", "cu_seqlens", "cu_seqlens_padded")


def by_hand(sources: list[EncodedSource], policy: PackingPolicy, *, keys: list[str], pad_id: int = 0) -> PackedBatch:
    """The same packs, of the sources themselves."""
    for source, key in zip(sources, keys, strict=True):
        source.key = key
    groups = policy.pack([len(source) for source in sources])
    return PackedBatch.from_packs([policy.build([sources[i] for i in group]) for group in groups], pad_id=pad_id)


def assert_equal_rows(found: PackedBatch, expected: PackedBatch) -> None:
    for name in TENSORS:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert getattr(found, name).dtype == getattr(expected, name).dtype, name
    assert (found.cu_seqlens is found.cu_seqlens_padded) == (expected.cu_seqlens is expected.cu_seqlens_padded)
    assert (found.max_seqlen, found.source_keys, found.ages) == (expected.max_seqlen, expected.source_keys, expected.ages)


def packed(batch: Any, policy: PackingPolicy = POLICY, **options: Any) -> CollatedRow:
    row = pack_collated(batch, policy=policy, **options)
    assert row is not None
    return row


def row_keys(count: int = len(LENGTHS), name: str = "batch") -> list[str]:
    return [f"{name}, row {number}" for number in range(count)]


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize(
    "policy",
    [
        POLICY,
        PackingPolicy(16, multiple=4),
        PackingPolicy(16, width="fixed", max_sources=3, fixed_boundaries=True),
        PackingPolicy(20, algorithm="concatenative"),
    ],
)
def test_a_padded_batch_is_the_row_of_its_sources(side: Side, policy: PackingPolicy) -> None:
    batch = pad(make_sources(LENGTHS), side)
    assert batch["attention_mask"].sum() == sum(LENGTHS) < batch["input_ids"].numel()
    before = {name: tensor.clone() for name, tensor in batch.items()}
    row = packed(batch, policy)
    assert_equal_rows(row, by_hand(make_sources(LENGTHS), policy, keys=row_keys()))
    assert all(torch.equal(batch[name], before[name]) for name in before)
    assert [row.source_keys.index(f"batch, row {place}") for place in row.places] == list(range(len(LENGTHS)))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=12),
    multiple=st.sampled_from([1, 4]),
    algorithm=st.sampled_from(["auto", "best_fit_decreasing", "concatenative"]),
    width=st.sampled_from(["variable", "fixed"]),
)
def test_any_rectangle_is_the_row_of_its_sources(
    rows: list[tuple[int, int]], multiple: int, algorithm: str, width: Any
) -> None:
    """Each row of a length, at a place of its own."""
    policy = PackingPolicy(12, multiple=multiple, algorithm=algorithm, width=width)
    sources = make_sources([length for length, _ in rows], prompt=0)
    shape = len(rows), 14
    batch = {"input_ids": torch.ones(shape, dtype=torch.int64), "attention_mask": torch.zeros(shape, dtype=torch.bool)}
    batch["labels"] = torch.full(shape, IGNORE)
    for number, (source, (length, start)) in enumerate(zip(sources, rows, strict=True)):
        place = slice(start, start + length)
        batch["input_ids"][number, place], batch["labels"][number, place] = source.input_ids, source.labels
        batch["attention_mask"][number, place] = True
    row = packed(batch, policy)
    kept = [(f"batch, row {i}", source) for i, source in enumerate(sources) if len(source) > 1]
    assert len(row.left_out) == len(rows) - len(kept)
    if kept:
        assert_equal_rows(row, by_hand([source for _, source in kept], policy, keys=[key for key, _ in kept]))
    else:
        assert row.source_keys == []


def waits_of(monkeypatch: pytest.MonkeyPatch, batch: dict[str, Any]) -> tuple[int, CollatedRow]:
    """How often a row of tensors without content is asked what is in them, and the row; the answers come from the batch."""
    waits: list[list[int]] = []
    tolist = Tensor.tolist

    def answered(tensor: Tensor) -> Any:
        if tensor.device.type != "meta":
            return tolist(tensor)
        waits.append(list(tensor.shape))
        with monkeypatch.context() as inner:
            inner.setattr(Tensor, "tolist", lambda answer: found.append(tolist(answer)) or found[-1])
            found: list[Any] = []
            real = extents(contents_of(batch, roles=BatchFields()), name="batch")
            assert len(found) == 1
            assert len(real) == tensor.shape[1]
        return found[0]

    monkeypatch.setattr(Tensor, "tolist", answered)
    there = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in batch.items()}
    row = packed(there)
    assert row.input_ids.device.type == row.shift_labels.device.type == row.cu_seqlens.device.type == "meta"
    return len(waits), row


def test_the_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor on the device "meta" has no content: to read it anywhere but there would be an error."""
    batch = pad(make_sources(LENGTHS), "left") | {"weights": torch.ones(len(LENGTHS), 14, 2)}
    waits, row = waits_of(monkeypatch, batch)
    assert waits == 1
    assert row.input_ids.shape == (1, sum(LENGTHS))
    assert row.extras["weights"].shape == (1, sum(LENGTHS), 2)


def test_lengths_on_the_cpu_need_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pad(make_sources(LENGTHS)) | {"lengths": list(LENGTHS)}
    del batch["attention_mask"]
    waits, row = waits_of(monkeypatch, batch)
    assert waits == 0
    assert row.input_ids.shape == (1, sum(LENGTHS))


def test_lengths_tell_the_same_as_a_mask() -> None:
    batch = pad(make_sources(LENGTHS))
    expected = packed(batch)
    del batch["attention_mask"]
    for lengths in (list(LENGTHS), torch.tensor(LENGTHS)):
        row = packed(batch | {"lengths": lengths})
        assert_equal_rows(row, expected)
        assert list(row.extras["lengths"]) == row.cu_seqlens.diff().tolist()


def test_shifted_labels_are_not_shifted_again() -> None:
    for side in ("left", "right"):
        batch = pad(make_sources(LENGTHS), side)
        expected = packed(batch)
        shifted = torch.full_like(batch["labels"], IGNORE)
        # A shift of the whole batch would move targets of first tokens onto padding; there are none here.
        shifted[:, :-1] = batch.pop("labels")[:, 1:]
        row = packed(batch | {"shift_labels": shifted})
        assert row.loss_mask.any()
        assert_equal_rows(row, expected)
        # The second count where both are there, as in transformers.
        assert_equal_rows(packed(batch | {"shift_labels": shifted, "labels": batch["input_ids"]}), expected)


def test_the_target_of_a_first_token_is_none() -> None:
    sources = make_sources(LENGTHS)
    batch = pad(sources, "left")
    for row, source in enumerate(sources):
        batch["labels"][row, -len(source)] = source.input_ids[0]
    assert_equal_rows(packed(batch), packed(pad(sources, "left")))


def test_overlength_follows_the_policy_and_is_counted() -> None:
    batch = pad(make_sources(LENGTHS))
    row = packed(batch, PackingPolicy(8))
    assert sorted(row.left_out) == [("batch, row 2", "overlength", 12), ("batch, row 4", "overlength", 9)]
    assert sorted(row.places) == [0, 1, 3]
    row = packed(batch, PackingPolicy(8, overlength="truncate"))
    assert sorted(row.left_out) == [("batch, row 2", "truncated", 4), ("batch, row 4", "truncated", 1)]
    assert sorted(row.cu_seqlens.diff().tolist()) == [3, 5, 7, 8, 8]
    with pytest.raises(OverlengthError, match=r"'batch, row 2' has 12 tokens, more than capacity=8"):
        packed(batch, PackingPolicy(8, overlength="error"))
    with pytest.raises(ValueError, match=r"overlength='split' cuts plain texts"):
        packed(batch, PackingPolicy(8, overlength="split"))


def test_rows_without_tokens_or_targets_are_left_out_with_their_reason() -> None:
    batch = pad(make_sources(LENGTHS))
    batch["attention_mask"][1] = 0
    batch["labels"][1] = IGNORE
    batch["labels"][3] = IGNORE
    row = packed(batch)
    assert sorted(row.left_out) == [("batch, row 1", "empty", 0), ("batch, row 3", "no_targets", 5)]
    assert sorted(row.places) == [0, 2, 4]
    # Results are asked for of a source without a target, too.
    assert sorted(packed(batch, needs_targets=False).places) == [0, 2, 3, 4]
    del batch["labels"]
    row = packed(batch)
    assert not row.labelled
    assert sorted(row.places) == [0, 2, 3, 4]
    assert not row.loss_mask.any()
    assert (row.labels == IGNORE).all()


def test_a_batch_of_which_all_is_left_out_is_a_pad() -> None:
    batch = pad(make_sources((12, 9)))
    row = packed(batch, PackingPolicy(4, width="fixed"), pad_id=2)
    assert row.input_ids.tolist() == [[2, 2, 2, 2]]
    assert row.source_keys == []
    assert len(row.left_out) == 2
    assert not row.loss_mask.any()


def test_what_lies_along_tokens_and_what_belongs_to_sources_travels() -> None:
    batch = pad(make_sources(LENGTHS), "both")
    count, width = batch["input_ids"].shape
    batch |= {
        "weights": torch.arange(count * width).reshape(count, width).float() + 1,
        "vectors": torch.randn(count, width, 3),
        "score": torch.arange(count),
        "pair": torch.arange(2 * count).reshape(count, 2),
        "text": [f"t{i}" for i in range(count)],
        "temperature": torch.tensor(20),
        "note": "x",
        "nothing": None,
    }
    row = packed(batch, PackingPolicy(16, multiple=4))
    assert row.places != list(range(count)), "the order of the sources must change for the test to tell"
    assert (row.segment_ids == 0).any()
    for start, length, place in zip(row.cu_seqlens_padded.tolist(), row.cu_seqlens.diff().tolist(), row.places, strict=False):
        real = batch["attention_mask"][place] == 1
        for name in ("weights", "vectors"):
            assert torch.equal(row.extras[name][0, start : start + length], batch[name][place, real])
    assert (row.extras["weights"][row.segment_ids == 0] == 0).all()
    assert row.extras["score"].tolist() == row.places
    assert row.extras["pair"].tolist() == [[2 * i, 2 * i + 1] for i in row.places]
    assert row.extras["text"] == [f"t{i}" for i in row.places]
    assert (row.extras["temperature"], row.extras["note"], row.extras["nothing"]) == (20, "x", None)
    # The shape does not tell; names do.
    batch["embedding"] = torch.randn(count, width)
    row = packed(batch, roles=BatchFields(per_source=("embedding",), leave_out=("note",)))
    assert torch.equal(row.extras["embedding"], batch["embedding"][row.places])
    assert "note" not in row.extras


@pytest.mark.parametrize("keys", [["a", "b", "c", "d", "e"], [5, 6, 7, 8, 9], torch.tensor([5, 6, 7, 8, 9])])
def test_sources_keep_their_own_keys(keys: Any) -> None:
    for name, roles in (("id", BatchFields()), ("number", BatchFields(key="number"))):
        row = packed(pad(make_sources(LENGTHS)) | {name: keys}, roles=roles)
        assert row.source_keys == [str(list(keys)[i] if isinstance(keys, list) else int(keys[i])) for i in row.places]


def test_media_keep_the_order_of_the_sources() -> None:
    batch = pad(make_sources(LENGTHS)) | {"pixel_values": torch.randn(3, 4, 4)}
    row = packed(batch)
    assert row.places == list(range(len(LENGTHS)))
    assert row.extras["pixel_values"] is batch["pixel_values"]
    with pytest.raises(CollatedBatchError, match=r"'best_fit_decreasing' changes the order of the sources, which pixel_values"):
        packed(batch, PackingPolicy(16, algorithm="best_fit_decreasing"))
    with pytest.raises(
        CollatedBatchError, match=r"'batch, row 2' would be left out \(overlength\), and pixel_values do not tell"
    ):
        packed(batch, PackingPolicy(9))
    with pytest.raises(CollatedBatchError, match=r"depend on its images.*get_rope_index"):
        packed(batch | {"image_grid_thw": torch.ones(3, 3, dtype=torch.int64)})
    positions = (
        torch.arange(batch["input_ids"].shape[1]).expand(3, *batch["input_ids"].shape) * torch.tensor([1, 2, 3])[:, None, None]
    )
    row = packed(batch | {"image_grid_thw": torch.ones(3, 3, dtype=torch.int64), "position_ids": positions})
    assert row.position_ids.shape == (4, 1, sum(LENGTHS))
    assert torch.equal(row.position_ids[0], packed(batch).position_ids)
    for axis in (1, 2, 3):
        assert torch.equal(row.position_ids[axis], row.position_ids[0] * axis)


def test_positions_are_those_of_the_row() -> None:
    batch = pad(make_sources(LENGTHS), "left")
    expected = packed(batch)
    positions = (batch["attention_mask"].cumsum(1) - 1).masked_fill(batch["attention_mask"] == 0, 1)
    assert_equal_rows(packed(batch | {"position_ids": positions}), expected)
    assert_equal_rows(packed(batch | {"position_ids": positions.expand(4, -1, -1)}, POLICY), expected_axes(expected))
    with pytest.raises(CollatedBatchError, match=r"position_ids of source 'batch, row 0' do not count up from 0.*\(7 differ\)"):
        packed(batch | {"position_ids": positions + 2})
    with pytest.raises(CollatedBatchError, match=r"position_ids has shape \[2, 5, 14\]"):
        packed(batch | {"position_ids": positions.expand(2, -1, -1)})


def expected_axes(row: CollatedRow) -> CollatedRow:
    row.position_ids = row.position_ids.expand(4, 1, -1)
    return row


@dataclass
class Collated:
    input_ids: Tensor
    attention_mask: Tensor | None
    labels: Tensor
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    input_ids: Tensor


@dataclass(slots=True)
class Slots:
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


class Pair(NamedTuple):
    input_ids: Tensor
    labels: Tensor


def test_a_batch_is_packed_in_place_whatever_holds_it() -> None:
    plain = pad(make_sources(LENGTHS))
    expected = packed(plain)
    packer = BatchPacker(POLICY, roles=BatchFields())
    for batch in (
        pad(make_sources(LENGTHS)),
        BatchEncoding(pad(make_sources(LENGTHS))),
        Collated(**pad(make_sources(LENGTHS))),
    ):
        row = packer.take(batch, stage="train", name="batch")
        assert row is not None
        assert packed_row(batch) is row
        assert_equal_rows(row, expected)
        get = batch.__getitem__ if not isinstance(batch, Collated) else lambda name, batch=batch: getattr(batch, name)
        for name, value in expected.model_inputs().items():
            assert torch.equal(get(name), value) if isinstance(value, Tensor) else get(name) == value
        assert get("attention_mask") is None
        assert get("cu_seq_lens_q") is get("cu_seq_lens_k")
    packer.end()
    assert packed_row(batch) is None


ONES = torch.ones(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((ONES, ONES), r"a tuple does not name its entries.*let collate_fn return a dict.*pack_loader"),
        (Pair(ONES, ONES), r"a Pair does not name its entries"),
        (Frozen(ONES), r"Frozen is a frozen dataclass"),
        (Slots(ONES, ONES, ONES), r"Slots is a dataclass with slots and has no place for cu_seq_lens_k, "),
        ({"input_ids": ONES, "labels": ONES}, r"has 2 rows of 4 tokens and neither attention_mask nor lengths"),
        (
            {"input_ids": ONES, "attention_mask": torch.ones(2, 1, 4, 4)},
            r"attention_mask is \[2, 1, 4, 4\] and input_ids \[2, 4\]",
        ),
        (
            {"input_ids": ONES, "attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])},
            r"mask of source 'batch 3, row 0' has 3 real tokens within 4: a hole",
        ),
        (
            {"input_ids": ONES, "attention_mask": torch.tensor([[1, 1, 2, 2], [1, 1, 0, 0]])},
            r"mask of source 'batch 3, row 0' has 2 values that are neither 0 \(padding\) nor 1: sources that it numbers",
        ),
        (
            {"input_ids": ONES, "attention_mask": torch.tensor([[0, 0, 0, 0], [0, 0, -1e9, -1e9]])},
            r"row 1' has 2 values that are neither",
        ),
        (
            {"input_ids": ONES[:1], "attention_mask": ONES[:1], "position_ids": torch.tensor([[0, 1, 0, 1]])},
            r"position_ids of source.*where they restart because several sources are packed.*leave attention_mask out",
        ),
        (
            {"input_ids": ONES, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), "labels": ONES},
            r"2 labels of source 'batch 3, row 1' are targets outside of its real tokens.*set them to -100",
        ),
        (
            {"input_ids": ONES, "attention_mask": ONES, "lengths": [4, 3]},
            r"row 1' has 4 real tokens by attention_mask, 3 by lengths",
        ),
        ({"input_ids": ONES, "lengths": [4, 5]}, r"lengths says 5 tokens of source 'batch 3, row 1', whose row has 4"),
        ({"input_ids": ONES, "lengths": [4]}, r"lengths=\[4\]: one whole number for each of the 2 rows"),
        ({"input_ids": ONES, "attention_mask": ONES, "labels": torch.ones(2)}, r"labels is torch.float32 of shape \[2\]"),
        (
            {"input_ids": ONES, "attention_mask": ONES, "x": torch.ones(3)},
            r"x has shape \[3\], which is neither.*media=\('x',\)",
        ),
        ({"input_ids": ONES, "attention_mask": ONES, "x": ["a"]}, r"x is a list of 1, but the batch has 2 sources"),
        (
            {"input_ids": ONES, "attention_mask": ONES, "inputs_embeds": ONES},
            r"holds inputs_embeds: packing needs the token ids",
        ),
        (
            {"input_ids": ONES, "attention_mask": ONES, "num_items_in_batch": 8},
            r"holds num_items_in_batch: the loss would be divided by it.*leave_out=\('num_items_in_batch',\)",
        ),
        ({"input_ids": ONES, "attention_mask": ONES, "decoder_input_ids": ONES}, r"not for encoder-decoder models"),
        (
            {"input_ids": ONES, "attention_mask": ONES, "cu_seq_lens_q": [0, 4]},
            r"holds cu_seq_lens_q, as a flattened batch does",
        ),
        ({"input_ids": ONES[0], "attention_mask": ONES}, r"input_ids is of shape \[4\].*int tensor \[sources, tokens\]"),
        ({"input_ids": ONES, "attention_mask": ONES}, r"batch 3 has neither labels nor shift_labels"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(batch: Any, message: str) -> None:
    with pytest.raises(CollatedBatchError, match=message):
        BatchPacker(POLICY, roles=BatchFields()).take(batch, stage="train", name="batch 3")


def test_roles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"media='x': a tuple of names is needed, such as \('x',\)"):
        BatchFields(media="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="labels is read for packing"):
        BatchFields(leave_out=("labels",))
    with pytest.raises(CollatedBatchError, match="BatchFields names 'x', but the batch has"):
        packed(pad(make_sources(LENGTHS)), roles=BatchFields(media=("x",)))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"buffer_size": 64}, "buffer_size=64"),
        ({"carry_over": False}, "carry_over=False"),
        ({"age_limit": 3.0}, "age_limit=3.0"),
        ({"balance": "quadratic", "window": 8}, "balance='quadratic', window=8"),
        ({"carry_over": False, "min_bins": 2}, "carry_over=False, min_bins=2"),
        ({"seed": 3}, "seed=3"),
    ],
)
def test_settings_of_a_stream_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"does not use {named}: leave it out, or pack over several batches"):
        BatchPacker(PackingPolicy(16, **options), roles=BatchFields())


def test_a_bare_capacity_is_no_policy() -> None:
    with pytest.raises(ValueError, match=r"policy=64 is no PackingPolicy: pass PackingPolicy\(capacity\)"):
        BatchPacker(64, roles=BatchFields())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="policy=None is no PackingPolicy"):
        pack_loader([], None)  # type: ignore[arg-type]


def test_a_stage_does_not_mix_packed_and_padded() -> None:
    packer = BatchPacker(POLICY, roles=BatchFields())
    row = by_hand(make_sources(LENGTHS), POLICY, keys=row_keys())
    packer.take(pad(make_sources(LENGTHS)), stage="train", name="batch 0")
    packer.take(row, stage="validation", name="batch 0")
    with pytest.raises(
        CollatedBatchError, match="batch 1 of the train data comes as PackedBatch, and those before came as padded"
    ):
        packer.take(row, stage="train", name="batch 1")
    packer.take({"input_ids": torch.arange(5)[None], "position_ids": torch.arange(5)[None]}, stage="predict", name="batch 0")
    with pytest.raises(CollatedBatchError, match=r"batch 1 of the predict data comes as padded, .* came as flattened"):
        packer.take(pad(make_sources(LENGTHS)), stage="predict", name="batch 1")
    packer.begin()
    packer.take(row, stage="train", name="batch 0")


# --- flattened ---------------------------------------------------------------------------------------------------------


def features() -> list[dict[str, list[int]]]:
    return [{"input_ids": s.input_ids.tolist(), "labels": s.labels.tolist()} for s in make_sources(LENGTHS)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_flash_attn_kwargs": True},
        {"return_seq_idx": True},
        {"return_position_ids": False, "return_flash_attn_kwargs": True, "return_seq_idx": True},
        {"return_position_ids": False, "return_seq_idx": True},
    ],
)
def test_a_flattened_batch_is_packed_as_it_is(options: dict[str, Any]) -> None:
    batch = DataCollatorWithFlattening(**options)(features(), return_tensors="pt")
    assert batch["input_ids"].shape == (1, sum(LENGTHS))
    row = pack_collated(batch, policy=None, name="batch")
    assert row is not None
    keys = [f"batch, source {number}" for number in range(len(LENGTHS))]
    one = PackingPolicy(64, algorithm="concatenative")
    assert_equal_rows(row, by_hand(make_sources(LENGTHS), one, keys=keys))
    assert row.places == list(range(len(LENGTHS)))
    assert ("seq_idx" in row.extras) == options.get("return_seq_idx", False)


def test_a_separator_that_is_a_token_is_no_target() -> None:
    batch = DataCollatorWithFlattening(separator_id=2)(features(), return_tensors="pt")
    assert (batch["labels"] == 2).any()
    row = pack_collated(batch, policy=None)
    assert row is not None
    assert (row.labels[0, row.cu_seqlens[:-1].long()] == IGNORE).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seq_lens_k": torch.tensor([0, 36])}, r"cu_seq_lens_q and cu_seq_lens_k of batch differ"),
        ({"cu_seq_lens_q": torch.tensor([0, 30]), "cu_seq_lens_k": None}, r"boundaries of batch are \[0, 30\] in a row of 36"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 8, 36]), "cu_seq_lens_k": None},
            r"do not restart at 0 with each source \(token 7 has 0",
        ),
        ({"position_ids": torch.arange(36)[None] + 2, "cu_seq_lens_q": None, "cu_seq_lens_k": None}, r"token 0 has 2"),
        ({"position_ids": torch.zeros(3, 1, 36)}, r"position_ids of batch is \[3, 1, 36\]"),
        ({"seq_idx": torch.zeros(1, 36)}, r"seq_idx of batch changes at \[\], the boundaries are \[0, 7, 10"),
    ],
)
def test_boundaries_that_contradict_are_refused(change: dict[str, Any], message: str) -> None:
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features(), return_tensors="pt") | change
    with pytest.raises(CollatedBatchError, match=message):
        pack_collated(batch, policy=None)


# --- unpack ------------------------------------------------------------------------------------------------------------


def test_unpack_gives_each_source_its_own_in_the_order_of_the_batch() -> None:
    sources = make_sources(LENGTHS)
    row = packed(pad(sources) | {"id": list("abcde")}, PackingPolicy(16, multiple=4))
    assert row.places != sorted(row.places)
    outputs = row.input_ids.double()[..., None].expand(-1, -1, 3)
    for form in (outputs, {"logits": outputs}):
        found = unpack(form, row)
        assert [key for key, _ in found] == list("abcde")
        for source, output in zip(sources, found, strict=True):
            assert torch.equal(output.values, source.input_ids.double()[:, None].expand(-1, 3))
    plain = by_hand(make_sources(LENGTHS), POLICY, keys=list("abcde"))
    assert [key for key, _ in unpack(plain.input_ids, plain)] == plain.source_keys
    with pytest.raises(ValueError, match=r"shape \[1, 3\] for a row of 4"):
        unpack(torch.ones(1, 3), row)
    with pytest.raises(ValueError, match="unpack got a list, which is neither"):
        unpack([1], row)
    with pytest.raises(ValueError, match="unpack got a dict that is not packed, or is not the batch in hand any more"):
        unpack(outputs, {})
