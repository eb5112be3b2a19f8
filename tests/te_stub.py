"""A strict ``transformer_engine.pytorch``: asserts what the real one asks of a call, and computes the formulas.

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


#: For each version that changed them: arguments of ``DotProductAttention.__init__`` and of its ``forward``, in order.
SIGNATURES = _signatures()


class StubAttention(nn.Module):
    """Subclassed for a version."""

    version = ""
    #: Arguments of every instance that was made, and of every call with the instance's mode, of this version.
    made: list[dict[str, Any]]
    calls: list[dict[str, Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        names, _ = SIGNATURES[self.version]
        assert not args, "arguments of __init__ have moved between versions: pass them by keyword"
        unknown = kwargs.keys() - set(names)
        assert not unknown, f"__init__ of {self.version} has no {sorted(unknown)}"
        self.options = kwargs
        channels = kwargs["kv_channels"]
        self.sizes = channels if isinstance(channels, tuple) else (channels, channels)
        assert kwargs["qkv_format"] == "thd"
        assert "padding" in kwargs["attn_mask_type"], "THD needs a padding mask"
        assert "causal" in kwargs["attn_mask_type"]
        assert kwargs["attention_dropout"] == 0
        self.made.append(kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Tensor:
        _, names = SIGNATURES[self.version]
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
        assert offsets[0] == 0
        assert offsets[-1] == len(q), "rows after the last boundary are memory that was never written"
        assert offsets == sorted(offsets)
        assert type(longest) is int, "without an int every layer waits for the device"
        assert type(kwargs["max_seqlen_kv"]) is int
        assert longest == kwargs["max_seqlen_kv"], "causal attention with unequal lengths has no FlashAttention"
        assert max(b - a for a, b in itertools.pairwise(offsets)) <= longest <= len(q)
        if "pad_between_seqs" in names:
            assert kwargs["pad_between_seqs"] is False, "None is a guess that waits for the device or is wrong"
            assert cu is kwargs["cu_seqlens_q_padded"]
            assert cu is kwargs["cu_seqlens_kv_padded"]
        else:
            assert kwargs.get("cu_seqlens_q_padded") is None, "this version compares them on the host"
            assert kwargs.get("cu_seqlens_kv_padded") is None
        left, right = self.options["window_size"]
        assert right == 0
        out = reference_attention(
            q, k, v, offsets=offsets, scale=self.options["softmax_scale"], window=None if left < 0 else left + 1
        )
        return out.flatten(1)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("a version replaces this")


def stub_class(version: str) -> type[StubAttention]:
    """``DotProductAttention`` of a version, whose forward shows the names of that version."""

    def forward(self: StubAttention, *args: Any, **kwargs: Any) -> Tensor:
        return self._call(*args, **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, default=None) for name in SIGNATURES[version][1]]
    forward.__signature__ = inspect.Signature([inspect.Parameter("self", kind), *parameters])  # type: ignore[attr-defined]
    members = {"version": version, "made": [], "calls": [], "forward": forward}
    return type("DotProductAttention", (StubAttention,), members)


@contextmanager
def transformer_engine(version: str) -> Iterator[type[StubAttention]]:
    """``transformer_engine.pytorch`` of a version in the place of what is installed."""
    package, torch_part = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    torch_part.DotProductAttention = stub_class(version)  # type: ignore[attr-defined]
    package.pytorch = torch_part  # type: ignore[attr-defined]
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
