"""Which backend a model gets, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from transformers import PreTrainedModel

from lightning_pack.attention.backends.base import USE_SEGMENTS, Backend, BackendError
from lightning_pack.attention.backends.segments import SegmentsBackend
from lightning_pack.attention.backends.transformer_engine import TransformerEngineBackend, te_unusable
from lightning_pack.attention.backends.varlen import VarlenBackend, varlen_unusable
from lightning_pack.attention.context_parallel import ContextGroup

#: What ``PackedAttention(backend=...)`` takes.
BackendName = Literal["auto", "te", "varlen", "segments"]


@dataclass(frozen=True, eq=False)
class BackendChoice:
    """A backend, and what speaks against the faster ones."""

    backend: Backend
    #: Empty where the backend was asked for.
    reason: str = ""

    def __str__(self) -> str:
        return f"backend {self.backend.name!r}" + (f" ({self.reason})" if self.reason else "")


def check_backend_name(name: str) -> None:
    """Refuse an unknown name.

    Raises:
        BackendError: with the names that exist.
    """
    if name not in get_args(BackendName):
        raise BackendError(f"backend={name!r}: choose one of {', '.join(map(repr, get_args(BackendName)))}")


def choose_backend(
    name: BackendName,
    model: PreTrainedModel,
    *,
    device: torch.device,
    dtype: torch.dtype,
    context: ContextGroup | None = None,
) -> BackendChoice:
    """The backend of this name, or the fastest that computes what ``model`` asks for.

    What a named backend does not compute is left to :func:`~lightning_pack.attention.inspection.inspect_model`.

    Args:
        name: of the backend; ``auto`` tries ``te``, ``varlen`` and ``segments`` in this order.
        model: whose attention it is to be.
        device: where the model runs.
        dtype: in which its attention is computed.
        context: the ranks that share each row; None where a rank has whole rows.

    Raises:
        BackendError: for an unknown name, or a named backend that is not usable here.
    """
    check_backend_name(name)
    if name == "segments":
        return BackendChoice(_over(SegmentsBackend(), context))
    if name == "auto":
        return _fastest(model, device=device, dtype=dtype, context=context)
    unusable = (te_unusable if name == "te" else varlen_unusable)(device, dtype)
    # The missing package first: without it no other device would help.
    backend = _over(_KINDS[name](), context)
    if unusable is not None:
        raise BackendError(f"backend {name!r} {unusable}; use backend='segments' there, or 'auto'")
    return BackendChoice(backend)


_KINDS: dict[str, Callable[[], Backend]] = {"te": TransformerEngineBackend, "varlen": VarlenBackend}


def _over(backend: Backend, context: ContextGroup | None) -> Backend:
    backend.context = context
    return backend


def _fastest(
    model: PreTrainedModel, *, device: torch.device, dtype: torch.dtype, context: ContextGroup | None
) -> BackendChoice:
    against: list[str] = []
    for name, kind in _KINDS.items():
        unusable = te_unusable(device, dtype, automatic=True) if name == "te" else varlen_unusable(device, dtype)
        if unusable is not None:
            against.append(f"{name!r} {unusable}")
            continue
        try:
            backend = _over(kind(), context)
        except BackendError as e:
            # With what to install, without the advice to take another backend.
            against.append(re.split(f"(;|, or) {re.escape(USE_SEGMENTS)}", str(e))[0])
            continue
        refusals = list(backend.refusals(model))
        if not refusals:
            return BackendChoice(backend, "; ".join(against) or "the first of 'te', 'varlen' and 'segments'")
        against.append(f"{name!r} does not compute {', '.join(refusals)}")
    return BackendChoice(_over(SegmentsBackend(), context), "; ".join(against))


def backend_refusals(backend: Backend, model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Reason and way out for all that ``model`` asks for and ``backend`` does not compute."""
    for refusal in backend.refusals(model):
        yield (
            f"backend {backend.name!r} does not compute {refusal}",
            "set PackedAttention(backend='segments'), or 'auto', which then chooses it",
        )
