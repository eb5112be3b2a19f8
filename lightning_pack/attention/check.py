"""The check of a user's own model: a packed row of random tokens, one source changed at a time, and each source alone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_pack.attention.activation import ActivatedModel, set_attention
from lightning_pack.attention.inspection import ModelRefusedError, find_models, require_packable
from lightning_pack.attention.preservation import left_as_it_was
from lightning_pack.attention.registration import ATTENTION, STRICT_ATTENTION
from lightning_pack.attention.verdict import IsolationVerdict, SourceIsolation
from lightning_pack.layout import RowLayout
from lightning_pack.row import PackedBatch
from lightning_pack.source import EncodedSource, Pack

#: Sources are padded to this, so that the row has a gap as well.
_MULTIPLE = 2
#: Rounding of a whole forward, relative to the largest logit. Some models compute parts in float32 whatever their weights are.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
#: The same tokens meet the same kernels in both runs, so other sources move by nothing at all.
_NO_MOVE = 1e-7
_EXPERTS = re.compile(r"Experts|MoE|Moe|Router|TopKGate")


def isolation_check(model: nn.Module, *, tokens: int = 64, sources: int = 5, seed: int = 0) -> IsolationVerdict:
    """Run a packed row of random tokens through ``model`` and tell whether its sources are apart.

    The row is run once as it is and once with each source changed: no other source's logits may move. Then every source is
    run alone, without boundaries and under the model's own attention: its logits have to be those of the row. That takes
    ``2 * sources + 1`` forwards on the model's device, without gradients and in evaluation mode. Mode, buffers, gradients,
    configuration and random state are as before afterwards, also after an error.

    Half precision hides small leaks in models with experts, and small differences in all models: check in float32 if you can.
    A sliding window cuts nothing in sources that are shorter: take ``tokens`` large enough to see one.

    Args:
        model: a causal model of transformers, or a module that holds one.
        tokens: real tokens of all sources together.
        sources: number of sources; the second one has a single token.
        seed: of the random tokens.

    Returns:
        The verdict; ``verdict.isolated`` says it in a word, ``print(verdict)`` shows each source.

    Raises:
        ModelRefusedError: if inspection already says that packed rows go wrong in the model.
        ValueError: for sizes that make no row, a model that attention refuses in its forward, and a model whose outputs do
            not tell anything: not finite, or the same whatever the tokens are.
    """
    found = find_models(model)
    if len(found) > 1:
        names = ", ".join(type(part).__name__ for part in found)
        raise ValueError(f"{type(model).__name__} holds {len(found)} models ({names}): check each of them on its own")
    causal = found[0]
    require_packable(causal)
    if causal.device.type == "meta":
        raise ValueError(f"{type(causal).__name__} has no weights (device meta), so nothing can be computed: load it first")
    lengths = _lengths(causal, tokens=tokens, sources=sources)
    row, others = _rows(causal, lengths, seed=seed)
    with torch.no_grad(), left_as_it_was(causal):
        # Alone first: what fails there is a fault of the model, not of packing.
        reference, alone = _alone(causal, row)
        moved, before = _moved(causal, row, others)
        scale = float(torch.cat(before).abs().max())
    rounding = _ROUNDING.get(causal.dtype, max(_ROUNDING.values()))
    experts = any(_EXPERTS.search(type(module).__name__) for module in causal.modules())
    verdicts = []
    for number, length in enumerate(lengths):
        by, most = max(((other, moved[other][number]) for other in range(sources) if other != number), key=lambda at: at[1])
        verdicts.append(
            SourceIsolation(
                number=number,
                tokens=length,
                moved=most,
                moved_by=by if most else None,
                alone=_distance(before[number], alone[number]),
            )
        )
    return IsolationVerdict(
        model=type(causal).__name__,
        dtype=_name(causal.dtype),
        device=str(causal.device),
        reference=reference,
        sources=tuple(verdicts),
        scale=scale,
        # Experts gather their tokens, so other tokens make other matrix shapes and another rounding.
        moved_limit=scale * (rounding if experts else _NO_MOVE),
        alone_limit=scale * rounding,
    )


def _lengths(model: PreTrainedModel, *, tokens: int, sources: int) -> list[int]:
    """Uneven lengths with a sum of ``tokens``; the second is 1, and only there and at the end can be a gap."""
    if sources < 3 or tokens < 3 * sources:
        raise ValueError(
            f"tokens={tokens}, sources={sources}: the check needs at least 3 sources, and 3 tokens a source so that their "
            "lengths differ"
        )
    weights = [0 if number == 1 else 3 + number % 3 for number in range(sources)]
    # Even, so that neighbours touch: what hands on the last few tokens only would not get over a gap.
    lengths = [1 if weight == 0 else (tokens - 1) * weight // sum(weights) // 2 * 2 for weight in weights]
    lengths[-1] += tokens - sum(lengths)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and max(lengths) > most:
        raise ValueError(
            f"tokens={tokens} in {sources} sources make one of {max(lengths)}, and {type(model).__name__} has "
            f"max_position_embeddings={most}: give fewer tokens or more sources"
        )
    return lengths


def _rows(model: PreTrainedModel, lengths: list[int], *, seed: int) -> tuple[PackedBatch, list[Tensor]]:
    """The row, and other tokens for each of its sources, all on the model's device."""
    ids = _plain_ids(model)
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(len(ids), (length,), generator=generator) for length in lengths]
    # Moved by 1 to n - 1 places, so that every token differs.
    moves = [torch.randint(1, len(ids), (length,), generator=generator) for length in lengths]
    packed = [EncodedSource.of(str(number), ids[at]) for number, at in enumerate(drawn)]
    row = PackedBatch.from_packs([Pack(packed, RowLayout.of(lengths, multiple=_MULTIPLE))], pad_id=int(ids[0]))
    others = [ids[(at + move) % len(ids)].to(model.device) for at, move in zip(drawn, moves, strict=True)]
    return row.to(model.device), others


def _plain_ids(model: PreTrainedModel) -> Tensor:
    """Token ids that stand for themselves: neither pads nor places of images."""
    embeddings: Any = model.get_input_embeddings()
    size = embeddings.weight.shape[0]
    special: set[Any] = set()
    for config in (model.config, model.config.get_text_config()):
        for name, value in config.to_dict().items():
            if name.endswith(("_token_id", "_token_index")):
                special.update(value if isinstance(value, list) else [value])
    ids = torch.tensor([number for number in range(min(size, 1 << 20)) if number not in special])
    if len(ids) < 2:
        raise ValueError(f"{type(model).__name__} has a vocabulary of {size} tokens: the check needs 2 that are not special")
    return ids


def _moved(model: PreTrainedModel, row: PackedBatch, others: list[Tensor]) -> tuple[list[list[float]], list[Tensor]]:
    """``moved[changed][source]`` in the packed row, and the logits of each source before."""
    active = ActivatedModel.of(model, attention=STRICT_ATTENTION)
    try:
        before = _by_source(_finite(model, _packed_logits(model, row)), row)
        moved = []
        for number, tokens in enumerate(others):
            ids = row.input_ids.clone()
            ids[row.segment_ids == number + 1] = tokens
            after = _by_source(_finite(model, _packed_logits(model, replace(row, input_ids=ids))), row)
            moved.append([_distance(a, b) for a, b in zip(before, after, strict=True)])
            if moved[-1][number] == 0:
                raise ValueError(
                    f"{type(model).__name__} gives the same logits for source {number} whatever its tokens are, so the check "
                    "cannot tell anything: are its weights loaded?"
                )
    finally:
        active.restore()
    return moved, before


def _alone(model: PreTrainedModel, row: PackedBatch) -> tuple[str, list[Tensor]]:
    """Name of the attention that each source alone was run with, and its logits."""
    text = model.config.get_text_config()
    own = text._attn_implementation
    reference = own if own not in (ATTENTION, STRICT_ATTENTION) else "sdpa" if model._supports_sdpa else "eager"
    if reference != own:
        set_attention(model, reference)
    try:
        # Neither positions nor boundaries: what the model makes of a plain sample.
        ids = [row.input_ids[row.segment_ids == number + 1][None] for number in range(len(row.source_keys))]
        logits = [_finite(model, _plain_logits(model, tokens, reference))[0] for tokens in ids]
    finally:
        if reference != own:
            set_attention(model, own)
    return reference, logits


def _plain_logits(model: PreTrainedModel, tokens: Tensor, attention: str) -> Tensor:
    try:
        output = model(input_ids=tokens, use_cache=False)
    except torch.OutOfMemoryError:
        raise
    # Whatever the code of a model raises.
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not run a plain sample of {tokens.shape[1]} tokens in {_name(model.dtype)} on "
            f"{model.device} under attention {attention!r}, so nothing can be said of packed rows ({type(error).__name__}: "
            f"{error}): try another dtype or device, and see whether it runs at all"
        ) from error
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != tokens.shape:
        shape = f" of shape {list(logits.shape)}" if isinstance(logits, Tensor) else ""
        raise ValueError(
            f"{type(model).__name__} gives {'logits' + shape if shape else 'no logits'} for {tokens.shape[1]} tokens, and the "
            "check compares those of each token: give it a model with a head for each token, such as AutoModelForCausalLM"
        )
    return logits


def _packed_logits(model: PreTrainedModel, row: PackedBatch) -> Tensor:
    inputs = row.model_inputs()
    del inputs["labels"], inputs["shift_labels"]
    try:
        return model(**inputs).logits
    except (AttributeError, KeyError, TypeError) as error:
        raise ModelRefusedError(
            f"{type(model).__name__} runs a plain sample, but its code fails with boundaries in the place of a mask "
            f"({type(error).__name__}: {error}): train it unpacked"
        ) from error


def _finite(model: PreTrainedModel, logits: Tensor) -> Tensor:
    if not bool(torch.isfinite(logits).all()):
        raise ValueError(
            f"{type(model).__name__} gives logits that are not finite in {_name(model.dtype)}, so the "
            "check cannot tell anything: check it in float32, and look at its weights"
        )
    return logits


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _by_source(logits: Tensor, row: PackedBatch) -> list[Tensor]:
    return [logits[row.segment_ids == number + 1] for number in range(len(row.source_keys))]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())
