"""A strict ``transformer_engine.pytorch``: asserts what the real one asks of a call, and computes the formulas.

Over context-parallel ranks it puts the rows of all ranks together and keeps its own part of the result.

The real package cannot be imported without CUDA. Names of arguments are those of its released versions.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.reference_attention import reference_attention

_INIT = """
    num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type window_size sequence_parallel
    tp_size get_rng_state_tracker tp_group layer_number attention_type cp_group cp_global_ranks cp_stream cp_comm_type
    softmax_scale
"""
_FORWARD = """
    query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded
    cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type window_size checkpoint_core_attention
    core_attention_bias_type core_attention_bias alibi_slopes fast_zero_fill inference_params
"""
#: Version since which, and after which argument (of __init__, of forward) new ones come: order matters to positional calls.
_ADDED: list[tuple[str, dict[str, list[str]], dict[str, list[str]]]] = [
    ("2.0", {}, {}),
    ("2.2", {}, {"inference_params": ["pad_between_seqs"]}),
    ("2.8", {"softmax_scale": ["softmax_type"]}, {"pad_between_seqs": ["fp8_output"]}),
    ("2.9", {"softmax_type": ["return_max_logit"]}, {}),
    ("2.10", {}, {"fp8_output": ["num_splits"]}),
    ("2.12", {"window_size": ["bottom_right_diagonal"]}, {"window_size": ["bottom_right_diagonal"]}),
    ("2.16", {"return_max_logit": ["name"]}, {}),
    ("2.17", {}, {"num_splits": ["score_mod", "score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors"]}),
    (
        "2.19",
        {},
        {"fp8_output": ["bf16_backward"], "score_mod_bprop_tensors": ["qkv_layer", "kv_layer", "qkv_interleave_dim"]},
    ),
    (
        "2.20",
        {"bottom_right_diagonal": ["softcap"]},
        {
            "bottom_right_diagonal": ["softcap"],
            "qkv_interleave_dim": ["thd_attention_policies", "thd_attention_policy_dispatch"],
        },
    ),
]


def _signatures() -> dict[str, tuple[list[str], list[str]]]:
    table: dict[str, tuple[list[str], list[str]]] = {}
    init, forward = _INIT.split(), _FORWARD.split()
    for version, more_init, more_forward in _ADDED:
        for names, more in ((init, more_init), (forward, more_forward)):
            for after, added in more.items():
                at = names.index(after) + 1
                names[at:at] = added
        table[version] = (list(init), list(forward))
    return table


def _at_least(version: str, other: str) -> bool:
    return tuple(map(int, version.split("."))) >= tuple(map(int, other.split(".")))


#: For each version that changed them: arguments of ``DotProductAttention.__init__`` and of its ``forward``, in order.
SIGNATURES = _signatures()


def signature_of(version: str) -> tuple[list[str], list[str]]:
    """Those of a version, which has them from an earlier one if it changed nothing."""
    return next(names for since, names in reversed(SIGNATURES.items()) if _at_least(version, since))


class StubAttention(nn.Module):
    """Subclassed for a version."""

    version = ""
    #: Arguments of every instance that was made, and of every call with the instance's mode, of this version.
    made: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    instances: list[StubAttention]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        names, _ = signature_of(self.version)
        assert not args, "arguments of __init__ have moved between versions: pass them by keyword"
        unknown = kwargs.keys() - set(names)
        assert not unknown, f"__init__ of {self.version} has no {sorted(unknown)}"
        self.options = kwargs
        self.cp_group: Any = None
        channels = kwargs["kv_channels"]
        self.sizes = channels if isinstance(channels, tuple) else (channels, channels)
        assert kwargs["qkv_format"] == "thd"
        assert "padding" in kwargs["attn_mask_type"], "THD needs a padding mask"
        assert "causal" in kwargs["attn_mask_type"]
        assert kwargs["attention_dropout"] == 0
        self.made.append(kwargs)
        self.instances.append(self)

    def set_context_parallel_group(self, *args: Any, **kwargs: Any) -> None:
        assert not args, "an argument came in 2.19: pass them by keyword"
        names = {"cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type"}
        names |= {"load_balancing_strategy"} if _at_least(self.version, "2.19") else set()
        assert names - {"load_balancing_strategy"} <= kwargs.keys() <= names
        self.cp_group, self.cp_comm_type = kwargs["cp_group"], kwargs["cp_comm_type"]
        self.cp_size, self.cp_rank = dist.get_world_size(self.cp_group), dist.get_rank(self.cp_group)
        assert kwargs["cp_global_ranks"] == dist.get_process_group_ranks(self.cp_group)
        since = {"p2p": "2.0", "a2a": "2.10", "all_gather": "2.18", "a2a+p2p": "2.19"}[self.cp_comm_type]
        assert _at_least(self.version, since), f"THD with {self.cp_comm_type} came in {since}"
        if self.options["window_size"] != (-1, 0):
            assert self.cp_comm_type in ("a2a", "all_gather"), "no sliding window otherwise"
        if self.cp_comm_type == "a2a":
            assert self.options["num_attention_heads"] % self.cp_size == 0
            assert self.options["num_gqa_groups"] % self.cp_size == 0

    def _held(self, offsets: list[int]) -> Tensor:
        """Places of the full row that this rank holds: of each source chunks r and 2c - 1 - r."""
        held = []
        for start, stop in itertools.pairwise(offsets):
            size = (stop - start) // (2 * self.cp_size)
            for chunk in (self.cp_rank, 2 * self.cp_size - 1 - self.cp_rank):
                held += range(start + chunk * size, start + (chunk + 1) * size)
        return torch.tensor(held)

    def _call(self, *args: Any, **kwargs: Any) -> Tensor:
        _, names = signature_of(self.version)
        assert not args, "arguments of forward have moved between versions: pass them by keyword"
        unknown = kwargs.keys() - set(names)
        assert not unknown, f"forward of {self.version} has no {sorted(unknown)}"
        self.calls.append({**kwargs, "training": self.training})
        q, k, v = (kwargs[f"{name}_layer"] for name in ("query", "key", "value"))
        heads, groups = self.options["num_attention_heads"], self.options["num_gqa_groups"]
        for tensor, number, size in ((q, heads, self.sizes[0]), (k, groups, self.sizes[0]), (v, groups, self.sizes[1])):
            assert tensor.shape[1:] == (number, size), f"[t, {number}, {size}] is needed, got {list(tensor.shape)}"
            assert tensor.dtype == q.dtype
            assert len(tensor) == len(q)
            assert tensor.is_contiguous(), "views are refused when compiled, and deprecated since 2.20"
        cu, longest = kwargs["cu_seqlens_q"], kwargs["max_seqlen_q"]
        assert cu is kwargs["cu_seqlens_kv"]
        assert (cu.dtype, cu.dim(), cu.device, cu.is_contiguous()) == (torch.int32, 1, q.device, True)
        offsets = cu.tolist()
        ranks = 1 if self.cp_group is None else self.cp_size
        total = len(q) * ranks
        assert offsets[0] == 0
        assert offsets[-1] == total, "rows after the last boundary are memory that was never written"
        if ranks > 1:
            assert not any(offset % (2 * ranks) for offset in offsets), "sources are cut in 2 * cp_size chunks"
            assert longest % (2 * ranks) == 0 or longest == total
        assert offsets == sorted(offsets)
        assert type(longest) is int, "without an int every layer waits for the device"
        assert type(kwargs["max_seqlen_kv"]) is int
        assert longest == kwargs["max_seqlen_kv"], "causal attention with unequal lengths has no FlashAttention"
        assert max(b - a for a, b in itertools.pairwise(offsets)) <= longest <= total
        if "pad_between_seqs" in names:
            assert kwargs["pad_between_seqs"] is False, "None is a guess that waits for the device or is wrong"
        if "pad_between_seqs" in names or ranks > 1:
            assert cu is kwargs["cu_seqlens_q_padded"]
            assert cu is kwargs["cu_seqlens_kv_padded"]
        else:
            assert kwargs.get("cu_seqlens_q_padded") is None, "this version compares them on the host"
            assert kwargs.get("cu_seqlens_kv_padded") is None
        left, right = self.options["window_size"]
        assert right == 0
        if ranks > 1:
            held = self._held(offsets)
            q, k, v = (self._together(tensor, held, total) for tensor in (q, k, v))
        out = reference_attention(
            q, k, v, offsets=offsets, scale=self.options["softmax_scale"], window=None if left < 0 else left + 1
        )
        return (out if ranks == 1 else out[held]).flatten(1)

    def _together(self, part: Tensor, held: Tensor, total: int) -> Tensor:
        """The full row, by a sum over ranks of rows that are 0 elsewhere; so is its gradient a sum over ranks."""
        row = part.new_zeros(total, *part.shape[1:]).index_copy(0, held, part)
        return _SumOverRanks.apply(row, self.cp_group)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("a version replaces this")


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def stub_class(version: str) -> type[StubAttention]:
    """``DotProductAttention`` of a version, whose forward shows the names of that version."""

    def forward(self: StubAttention, *args: Any, **kwargs: Any) -> Tensor:
        return self._call(*args, **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, default=None) for name in signature_of(version)[1]]
    forward.__signature__ = inspect.Signature([inspect.Parameter("self", kind), *parameters])  # type: ignore[attr-defined]
    members = {"version": version, "made": [], "calls": [], "instances": [], "forward": forward}
    return type("DotProductAttention", (StubAttention,), members)


@contextmanager
def transformer_engine(version: str) -> Iterator[type[StubAttention]]:
    """``transformer_engine.pytorch`` of a version in the place of what is installed."""
    package, torch_part = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    torch_part.DotProductAttention = stub_class(version)  # type: ignore[attr-defined]
    package.pytorch = torch_part  # type: ignore[attr-defined]
    package.__version__ = version  # type: ignore[attr-defined]
    names = {"transformer_engine": package, "transformer_engine.pytorch": torch_part}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        yield torch_part.DotProductAttention
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
