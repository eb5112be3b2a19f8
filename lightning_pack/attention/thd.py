"""THD inputs: what variable-length kernels are told about a row.

A row of T tokens is one long sequence ``[T, heads, D]`` whose sources are told apart by boundaries. With sources of 5 and 3
real tokens, each padded to a multiple of 4::

    tokens              a a a a a . . . | b b b .
    physical boundaries [0, 8, 12]      a pad is the tail of its source, and real tokens never see it: attention is causal
    real boundaries     [0, 5, 8]       cumulative lengths; with the physical offsets beside them, and gaps between

Physical boundaries are right for every kernel and version, so they are the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_pack.attention.segments import segment_lengths
from lightning_pack.row import PackedBatch


@dataclass(frozen=True, eq=False)
class THDInputs:
    """Boundaries of one row as kernels take them. Nothing here waits for the device, except :attr:`lengths`."""

    #: int32 ``[N+1]`` on the row's device: physical offsets, or cumulative real lengths where :attr:`pad_between_seqs`.
    cu_seqlens: Tensor
    #: int32 ``[N+1]``: physical offsets, from 0 to T; the same object as :attr:`cu_seqlens` unless :attr:`pad_between_seqs`.
    cu_seqlens_padded: Tensor
    #: At least the longest physical source, in tokens.
    max_seqlen: int
    #: Physical width of the row, in tokens.
    total: int
    #: Whether there are places between sources that belong to none.
    pad_between_seqs: bool = False

    def __post_init__(self) -> None:
        if (self.cu_seqlens is not self.cu_seqlens_padded) != self.pad_between_seqs:
            raise ValueError(
                f"pad_between_seqs={self.pad_between_seqs} with {'two tensors' if not self.pad_between_seqs else 'one tensor'} "
                "of boundaries: kernels tell 'no gaps' by identity; pass one tensor as both, or real and physical boundaries "
                "with pad_between_seqs=True"
            )
        for tensor in (self.cu_seqlens, self.cu_seqlens_padded):
            if tensor.dtype != torch.int32 or tensor.dim() != 1 or len(tensor) < 2:
                raise ValueError(
                    f"boundaries are int32 of shape [N+1] with N >= 1, got {tensor.dtype} of shape {list(tensor.shape)}: "
                    "pass PackedBatch.cu_seqlens_padded"
                )
        if len(self.cu_seqlens) != len(self.cu_seqlens_padded):
            raise ValueError(
                f"{len(self.cu_seqlens)} real boundaries and {len(self.cu_seqlens_padded)} physical ones: pass those of one row"
            )
        # While torch.compile traces, an int may be symbolic.
        if not isinstance(self.max_seqlen, int | torch.SymInt):
            raise ValueError(
                f"max_seqlen is a {type(self.max_seqlen).__name__}; kernels need a Python int, else each layer waits for the "
                "device: pass PackedBatch.max_seqlen"
            )

    @classmethod
    def of(
        cls, batch: PackedBatch, *, boundaries: Literal["physical", "real"] = "physical", max_seqlen_multiple: int = 1
    ) -> THDInputs:
        """The inputs of a row.

        Args:
            batch: a row on any device.
            boundaries: ``physical`` makes pads the tail of their source, ``real`` leaves gaps.
            max_seqlen_multiple: ``max_seqlen`` is rounded up to a multiple of this, to at most the width of the row: kernels
                that choose an algorithm or compile for each new value see fewer of them.

        Raises:
            ValueError: for other boundaries, a multiple below 1, or a row without sources.
        """
        if boundaries not in ("physical", "real"):
            raise ValueError(f"boundaries={boundaries!r}: choose 'physical' or 'real'")
        total = batch.width
        gaps = boundaries == "real" and batch.cu_seqlens is not batch.cu_seqlens_padded
        return cls(
            cu_seqlens=batch.cu_seqlens if gaps else batch.cu_seqlens_padded,
            cu_seqlens_padded=batch.cu_seqlens_padded,
            max_seqlen=bucketed(batch.max_seqlen, multiple=max_seqlen_multiple, limit=total),
            total=total,
            pad_between_seqs=gaps,
        )

    @classmethod
    def of_rows(cls, rows: int, length: int, *, device: torch.device) -> THDInputs:
        """Plain rows of equal length, laid end to end."""
        cu = torch.arange(0, rows * length + 1, max(length, 1), dtype=torch.int32, device=device)
        inputs = cls(cu_seqlens=cu, cu_seqlens_padded=cu, max_seqlen=length, total=rows * length)
        inputs.__dict__["lengths"] = [length] * rows
        return inputs

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Physical length of each source, in tokens; waits for the device once.

        Raises:
            ValueError: for boundaries that do not run from 0 to T.
        """
        return segment_lengths(self.cu_seqlens_padded, total=self.total)

    @cached_property
    def real_lengths(self) -> Sequence[int]:
        """Real length of each source, in tokens, without the places of a gap; waits for the device once."""
        if not self.pad_between_seqs:
            return self.lengths
        return [stop - start for start, stop in pairwise(self.cu_seqlens.tolist())]


def bucketed(max_seqlen: int, *, multiple: int, limit: int) -> int:
    """``max_seqlen`` rounded up to a multiple, to at most ``limit``.

    Raises:
        ValueError: for a multiple below 1.

    Example:
        >>> bucketed(130, multiple=64, limit=4096), bucketed(130, multiple=64, limit=150)
        (192, 150)
    """
    if multiple < 1:
        raise ValueError(f"a multiple of {multiple} for max_seqlen: at least 1 is needed")
    return max(max_seqlen, min(-(-max_seqlen // multiple) * multiple, limit))


def packed_seq_params(inputs: THDInputs, *, seq_idx: bool = False) -> Any:
    """The inputs as megatron-core's ``PackedSeqParams``, with the fields that the installed version has.

    Args:
        inputs: physical boundaries; real ones need a version that can say ``pad_between_seqs``.
        seq_idx: have it number the sources token by token, which state-space and linear-attention layers need.

    Raises:
        ImportError: without megatron-core.
        ValueError: if the installed version has no field for what is asked.
    """
    try:
        kind = import_module("megatron.core.packed_seq_params").PackedSeqParams
    except ImportError as e:
        raise ImportError(
            f"packed_seq_params needs megatron-core, which cannot be imported ({e}): pip install megatron-core"
        ) from e
    known = {field.name for field in fields(kind)}
    values: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": inputs.cu_seqlens,
        "cu_seqlens_kv": inputs.cu_seqlens,
        "cu_seqlens_q_padded": inputs.cu_seqlens_padded,
        "cu_seqlens_kv_padded": inputs.cu_seqlens_padded,
        "max_seqlen_q": inputs.max_seqlen,
        "max_seqlen_kv": inputs.max_seqlen,
    }
    missing = sorted(values.keys() - known)
    if missing:
        raise ValueError(
            f"PackedSeqParams of the installed megatron-core has no {', '.join(missing)}: use version 0.10 or later"
        )
    if "pad_between_seqs" in known:
        values["pad_between_seqs"] = inputs.pad_between_seqs
    elif inputs.pad_between_seqs:
        raise ValueError(
            "real boundaries leave gaps, and PackedSeqParams of the installed megatron-core has no pad_between_seqs to say so; "
            "kernels that guess do not see a gap after the last source: use THDInputs.of(batch), or megatron-core 0.19 or later"
        )
    if seq_idx:
        if "total_tokens" not in known:
            raise ValueError(
                "seq_idx=True: PackedSeqParams of the installed megatron-core has no total_tokens, from which it numbers the "
                "sources: use megatron-core 0.17 or later"
            )
        values["total_tokens"] = inputs.total
    return kind(**values)
