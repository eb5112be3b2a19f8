"""THD inputs: which boundaries kernels get, and which are refused before."""

import copy
import sys
from dataclasses import field, make_dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_pack.attention import BoundariesError, THDInputs, check_boundaries, packed_seq_params
from lightning_pack.attention.thd import bucketed
from lightning_pack.layout import RowLayout
from lightning_pack.row import PackedBatch
from lightning_pack.source import Pack
from tests.tiny_models import make_sources, pack_row


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def padded() -> PackedBatch:
    batch = pack_row(make_sources([5, 3]), multiple=4)
    assert (batch.cu_seqlens.tolist(), batch.cu_seqlens_padded.tolist()) == ([0, 5, 8], [0, 8, 12])
    return batch


def test_physical_boundaries_are_one_object() -> None:
    batch = padded()
    inputs = THDInputs.of(batch)
    assert inputs.cu_seqlens is inputs.cu_seqlens_padded is batch.cu_seqlens_padded
    assert (inputs.max_seqlen, inputs.total, inputs.pad_between_seqs) == (8, 12, False)
    assert inputs.lengths == inputs.real_lengths == [8, 4]


def test_real_boundaries_say_that_there_are_gaps() -> None:
    batch = padded()
    inputs = THDInputs.of(batch, boundaries="real")
    assert inputs.cu_seqlens is batch.cu_seqlens
    assert inputs.cu_seqlens_padded is batch.cu_seqlens_padded
    assert inputs.pad_between_seqs is True
    assert (inputs.lengths, inputs.real_lengths) == ([8, 4], [5, 3])
    whole = pack_row(make_sources([5, 3]))
    assert whole.cu_seqlens is whole.cu_seqlens_padded
    without = THDInputs.of(whole, boundaries="real")
    assert without.cu_seqlens is without.cu_seqlens_padded
    assert without.pad_between_seqs is False


def test_the_longest_source_is_rounded_up_to_at_most_the_row() -> None:
    batch = pack_row(make_sources([33, 9, 30]))
    assert THDInputs.of(batch).max_seqlen == 33
    assert [THDInputs.of(batch, max_seqlen_multiple=m).max_seqlen for m in (32, 50, 64, 128)] == [64, 50, 64, 72]
    assert bucketed(64, multiple=64, limit=64) == 64
    with pytest.raises(ValueError, match="multiple of 0"):
        THDInputs.of(batch, max_seqlen_multiple=0)
    with pytest.raises(ValueError, match=r"boundaries='both': choose 'physical' or 'real'"):
        THDInputs.of(batch, boundaries="both")  # type: ignore[arg-type]


def test_inputs_without_the_promises_of_kernels_are_refused() -> None:
    cu = ints(0, 4)
    for values, message in (
        ((cu, cu.clone(), 4, 4), "pad_between_seqs=False with two tensors.*by identity"),
        ((cu, cu, 4, 4, True), "pad_between_seqs=True with one tensor"),
        ((ints(0), ints(0, 4), 4, 4, True), r"N >= 1, got torch.int32 of shape \[1\]"),
        ((ints(0, 4), ints(0, 2, 4), 4, 4, True), "2 real boundaries and 3 physical"),
        ((cu, cu, torch.tensor(4), 4), "max_seqlen is a Tensor.*Python int"),
    ):
        with pytest.raises(ValueError, match=message):
            THDInputs(*values)
    long = torch.tensor([0, 4])
    with pytest.raises(ValueError, match=r"got torch.int64"):
        THDInputs(long, long, 4, 4)


# --- megatron-core ---------------------------------------------------------------------------------------------------------

_CU = ["cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"]
_FIRST = ["qkv_format", *_CU, "max_seqlen_q", "max_seqlen_kv"]
_FIELDS = {
    "0.10": _FIRST,
    "0.16": [*_FIRST, "local_cp_size", "cp_group"],
    "0.18": [*_FIRST, "local_cp_size", "cp_group", "total_tokens", "seq_idx"],
    "0.19": [*_FIRST, "local_cp_size", "cp_group", "total_tokens", "seq_idx", "tokens_per_sample", "pad_between_seqs"],
}


def install(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    core, module = ModuleType("megatron.core"), ModuleType("megatron.core.packed_seq_params")
    kind = make_dataclass("PackedSeqParams", [(name, Any, field(default=None)) for name in names])
    module.PackedSeqParams = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", module)


@pytest.mark.parametrize("version", _FIELDS)
def test_packed_seq_params_by_the_fields_that_there_are(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, _FIELDS[version])
    batch = padded()
    params = packed_seq_params(THDInputs.of(batch, max_seqlen_multiple=16))
    cu = batch.cu_seqlens_padded
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q is params.cu_seqlens_kv is params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded is cu
    assert params.max_seqlen_q == params.max_seqlen_kv == 12
    assert getattr(params, "total_tokens", None) is None
    if version == "0.19":
        assert params.pad_between_seqs is False
        gaps = packed_seq_params(THDInputs.of(batch, boundaries="real"))
        assert gaps.cu_seqlens_q is gaps.cu_seqlens_kv is batch.cu_seqlens
        assert gaps.cu_seqlens_q_padded is gaps.cu_seqlens_kv_padded is cu
        assert gaps.pad_between_seqs is True
    else:
        with pytest.raises(ValueError, match=r"no pad_between_seqs to say so.*THDInputs.of\(batch\).*0.19"):
            packed_seq_params(THDInputs.of(batch, boundaries="real"))
    if version in ("0.18", "0.19"):
        assert packed_seq_params(THDInputs.of(batch), seq_idx=True).total_tokens == 12
    else:
        with pytest.raises(ValueError, match=r"no total_tokens.*0.17 or later"):
            packed_seq_params(THDInputs.of(batch), seq_idx=True)


def test_other_packed_seq_params_and_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = THDInputs.of(padded())
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", None)
    with pytest.raises(ImportError, match=r"needs megatron-core.*pip install megatron-core"):
        packed_seq_params(inputs)
    install(monkeypatch, ["qkv_format", "cu_seqlens_q"])
    with pytest.raises(ValueError, match=r"has no cu_seqlens_kv, cu_seqlens_kv_padded, .*0.10 or later"):
        packed_seq_params(inputs)


# --- checks where the row is made ------------------------------------------------------------------------------------------


def test_rows_as_they_come_pass() -> None:
    for batch in (padded(), pack_row(make_sources()), PackedBatch.from_packs([Pack([], None)], pad_id=0)):
        check_boundaries(batch)
        check_boundaries(copy.deepcopy(batch))
    # A fixed number of boundaries: the last offset is repeated.
    batch = padded()
    check_boundaries(replace(batch, cu_seqlens=ints(0, 5, 8, 8), cu_seqlens_padded=ints(0, 8, 12, 12)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": ints(1, 5, 8)}, "real boundaries start at 1 and not at 0"),
        ({"cu_seqlens_padded": ints(4, 8, 12)}, "physical boundaries start at 4"),
        ({"cu_seqlens": ints(0, 5, 3)}, r"decrease at source 1 \('s0.1'\): real \[5, 3\]"),
        ({"cu_seqlens_padded": ints(0, 8, 7)}, r"decrease at source 1 .*physical \[8, 7\]"),
        ({"cu_seqlens_padded": ints(0, 8, 11)}, "last physical boundary is 11 but the row has 12 tokens"),
        ({"cu_seqlens_padded": ints(0, 8, 16)}, "last physical boundary is 16 but the row has 12 tokens"),
        ({"cu_seqlens": ints(0, 5, 10)}, r"source 1 \('s0.1'\) has 5 real tokens in 4 physical places"),
        ({"cu_seqlens": ints(0, 5)}, "2 real boundaries and 3 physical"),
        ({"cu_seqlens": ints(0, 8), "cu_seqlens_padded": ints(0, 12)}, "2 boundaries for 2 sources"),
        ({"cu_seqlens": torch.tensor([0, 5, 8])}, r"cu_seqlens is torch.int64 of shape \[3\]"),
        ({"cu_seqlens_padded": ints(0, 8, 12)[None]}, r"cu_seqlens_padded is torch.int32 of shape \[1, 3\]"),
        ({"cu_seqlens_padded": ints(0, 0, 8, 8, 12, 12)[::2]}, "cu_seqlens_padded is not contiguous"),
        ({"cu_seqlens": ints(0, 8, 12)}, r"both \[0, 8, 12\] but two tensors.*by identity"),
        ({"max_seqlen": 7}, "max_seqlen=7 is less than the longest physical source of 8"),
        ({"max_seqlen": torch.tensor(8)}, "max_seqlen is of type Tensor.*Python int"),
        ({"labels": torch.zeros(1, 11)}, r"labels have shape \[1, 11\] and input_ids \[1, 12\]"),
        ({"position_ids": torch.zeros(1, 11)}, r"position_ids have shape \[1, 11\] in a row of 12"),
        ({"input_ids": torch.zeros(2, 12)}, r"input_ids have shape \[2, 12\]"),
        ({"cu_seqlens": torch.empty(3, dtype=torch.int32, device="meta")}, "cu_seqlens is on meta: .*before it is moved"),
    ],
)
def test_wrong_boundaries_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BoundariesError, match=message):
        check_boundaries(replace(padded(), **changes))


def test_a_layout_of_other_sources_is_refused_where_the_row_is_made() -> None:
    sources = make_sources([6, 4])
    with pytest.raises(BoundariesError, match=r"source 0 \('s0.0'\) has 6 real tokens in 5 physical places"):
        PackedBatch.from_packs([Pack(sources, RowLayout.of([5, 5]))], pad_id=0)
    again = type(BoundariesError("text"))("text")
    assert str(again) == "text"
