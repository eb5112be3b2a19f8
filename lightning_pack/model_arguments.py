"""The keyword arguments with which a model takes a packed row, or a part of one."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from torch import Tensor, nn


class RowTensors(Protocol):
    """What a row, or a part of one, has for a model; see :class:`~lightning_pack.row.PackedBatch`."""

    @property
    def input_ids(self) -> Tensor: ...  # noqa: D102
    @property
    def position_ids(self) -> Tensor: ...  # noqa: D102
    @property
    def labels(self) -> Tensor: ...  # noqa: D102
    @property
    def shift_labels(self) -> Tensor: ...  # noqa: D102
    @property
    def cu_seqlens_padded(self) -> Tensor: ...  # noqa: D102
    @property
    def max_seqlen(self) -> int: ...  # noqa: D102
    def padding_mask(self) -> Tensor: ...  # noqa: D102


def model_arguments(row: RowTensors, model: nn.Module | None = None) -> dict[str, Any]:
    """Keyword arguments of a transformers causal model, boundaries physical; those of images and the like where it has any.

    Args:
        row: the row, or a part of it.
        model: the module that they are for; one that :func:`takes_padding_mask` gets ``padding_mask`` too. None gets none.
    """
    arguments = {
        "input_ids": row.input_ids,
        "position_ids": row.position_ids,
        "labels": row.labels,
        "shift_labels": row.shift_labels,
        "cu_seq_lens_q": row.cu_seqlens_padded,
        "cu_seq_lens_k": row.cu_seqlens_padded,
        "max_length_q": row.max_seqlen,
        "max_length_k": row.max_seqlen,
        "use_cache": False,
        **getattr(row, "media", {}),
    }
    if model is not None and takes_padding_mask(model):
        arguments["padding_mask"] = row.padding_mask()
    return arguments


def takes_padding_mask(model: nn.Module) -> bool:
    """Whether the ``forward`` of a module names ``padding_mask``; what would only land in its ``**kwargs`` is not taken.

    A module that :func:`torch.compile` wraps, or another keeps as ``module`` (DistributedDataParallel does), is asked itself.
    """
    while isinstance(inner := getattr(model, "_orig_mod", None) or getattr(model, "module", None), nn.Module):
        model = inner
    return "padding_mask" in inspect.signature(model.forward).parameters
