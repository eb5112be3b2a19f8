"""The proof for images: a packed row is each of its chats alone, and images stay with their chats."""

from __future__ import annotations

import dataclasses
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lightning_pack import ContextSlice, PackingPolicy, ParallelLayout
from lightning_pack.attention import STRICT_ATTENTION, ActivatedModel, leaking_sources
from lightning_pack.row import PackedBatch
from lightning_pack.source import IGNORE, EncodedSource, Pack
from tests.test_vision_encoder import record
from tests.tiny_models import forward_inputs, gradients_of, largest_difference
from tests.tiny_vision import vision_encoder, vision_model

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
#: Of each chat of a row.
IMAGES = (2, 0, 1, 4, 3)
FIELDS = ("input_ids", "labels", "shift_labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded", "segment_ids")


def vision_sources(family: str, images: tuple[int, ...] = IMAGES) -> list[EncodedSource]:
    encoder = vision_encoder(family)
    return [encoder(f"chat{i}", record(i, count)).completed() for i, count in enumerate(images)]


def vision_row(sources: list[EncodedSource], *, multiple: int = 1) -> PackedBatch:
    policy = PackingPolicy(capacity=1024, multiple=multiple)
    # Two packs in a row, as packs_per_batch gives them.
    return PackedBatch.from_packs([policy.build(sources[:2]), policy.build(sources[2:])], pad_id=0)


def alone(model: PreTrainedModel, source: EncodedSource) -> Tensor:
    """Logits ``[L, V]`` of a chat by itself, with positions of the model's own."""
    ids = source.input_ids[None]
    kinds = (ids == model.config.image_token_id).int()
    return model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **source.media).logits[0]


def summed_loss(logits: Tensor, source: EncodedSource) -> Tensor:
    return F.cross_entropy(logits[:-1], source.labels[1:], ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_every_gradient(family: str, multiple: int) -> None:
    model = vision_model(family)
    sources = vision_sources(family)
    row = vision_row(sources, multiple=multiple)
    assert row.media["image_grid_thw"].shape == (sum(IMAGES), 3)
    assert row.media_rows["image_grid_thw"] == list(IMAGES)
    assert row.position_ids.shape == (4, 1, row.input_ids.shape[1])
    assert not torch.equal(row.position_ids[0], row.position_ids[1])
    assert bool((row.segment_ids == 0).any()) == (multiple > 1)

    expected_logits = [alone(model, source) for source in sources]
    targets = sum(int((source.labels != IGNORE).sum()) for source in sources)
    expected_loss = torch.stack([summed_loss(*each) for each in zip(expected_logits, sources, strict=True)]).sum() / targets
    model.zero_grad()
    expected_loss.backward()
    expected = gradients_of(model)
    assert len(expected) == len(list(model.parameters()))
    assert any(name.startswith("model.visual") and float(g.abs().max()) > 1e-4 for name, g in expected.items())

    ActivatedModel.of(model)
    assert model.config.get_text_config()._attn_implementation == STRICT_ATTENTION
    logits = model(**forward_inputs(row)).logits
    for number, one in enumerate(expected_logits):
        assert (logits[row.segment_ids == number + 1] - one).abs().max().item() <= 1e-5
    loss = F.cross_entropy(logits[0], row.shift_labels[0], ignore_index=IGNORE)
    assert int(row.loss_mask.sum()) == targets
    assert abs(loss.item() - expected_loss.item()) <= 1e-5
    model.zero_grad()
    loss.backward()
    assert largest_difference(gradients_of(model), expected) <= 1e-5
    # The loss that the model computes from what the row passes is the same one.
    assert abs(model(**row).loss.item() - expected_loss.item()) <= 1e-5


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_nothing_of_a_chat_or_its_images_reaches_another(family: str) -> None:
    model = vision_model(family)
    row = vision_row(vision_sources(family))
    ActivatedModel.of(model)
    for source in range(len(IMAGES)):
        # On some processors matrix products of the vision encoder round in other ways for other rows of the same tensor; a leak
        # is a thousand times as much.
        assert leaking_sources(model, row, source=source, tolerance=1e-5) == []


def test_the_probe_sees_a_leak_of_images_alone() -> None:
    model = vision_model("qwen3_vl")
    row = vision_row(vision_sources("qwen3_vl"))
    active = ActivatedModel.of(model)
    merge = model.model.visual.merger.register_forward_hook(lambda _, __, out: out + 0.1 * out.mean(0))
    found = leaking_sources(model, row, source=0, tolerance=1e-5)
    merge.remove()
    # Chat 1 has no image, so nothing reaches it.
    assert found == ["chat2", "chat3", "chat4"]
    active.restore()


def test_without_boundaries_chats_leak() -> None:
    model = vision_model("qwen3_vl")
    row = vision_row(vision_sources("qwen3_vl"))
    inputs = forward_inputs(row)
    sources = vision_sources("qwen3_vl")
    for name in [name for name in inputs if name.startswith(("cu_seq", "max_length"))]:
        del inputs[name]
    inputs["position_ids"] = inputs["position_ids"][1:]
    logits = model(**inputs).logits
    moved = [(logits[row.segment_ids == i + 1] - alone(model, s)).abs().max().item() for i, s in enumerate(sources)]
    assert moved[0] <= 1e-5
    assert min(moved[1:]) > 1e-2


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_swapped_images_are_noticed(family: str) -> None:
    """The model matches images to placeholders by order alone, and does not complain: the row has to be right."""
    model = vision_model(family)
    encoder = vision_encoder(family)
    given = [record(i, 1) for i in range(2)]
    # Two images of one size.
    contents = [record(i, 2).files["0.png"] for i in (0, 5)]
    assert contents[0] != contents[1]
    for each, content in zip(given, contents, strict=True):
        each.files = {"0.png": content}
    sources = [encoder(f"chat{i}", each).completed() for i, each in enumerate(given)]
    assert torch.equal(sources[0].media["image_grid_thw"], sources[1].media["image_grid_thw"])
    row = vision_row_of_one_pack(sources)
    ActivatedModel.of(model)
    # A model that does not pack.
    reference = vision_model(family)

    def differences(row: PackedBatch) -> list[float]:
        logits = model(**forward_inputs(row)).logits
        return [(logits[row.segment_ids == i + 1] - alone(reference, s)).abs().max().item() for i, s in enumerate(sources)]

    assert max(differences(row)) <= 1e-5
    half = len(row.media["pixel_values"]) // 2
    swapped = {**row.media, "pixel_values": row.media["pixel_values"].roll(half, 0)}
    assert min(differences(dataclasses.replace(row, media=swapped))) > 1e-2
    # And by what a row is made of: sources in another order bring their images along.
    turned = vision_row_of_one_pack(sources[::-1])
    assert torch.equal(turned.media["pixel_values"], swapped["pixel_values"])
    logits = model(**forward_inputs(turned)).logits
    assert (logits[turned.segment_ids == 1] - alone(reference, sources[1])).abs().max().item() <= 1e-5


def vision_row_of_one_pack(sources: list[EncodedSource]) -> PackedBatch:
    return PackedBatch.from_packs([PackingPolicy(capacity=1024).build(sources)], pad_id=0)


def same_row(a: PackedBatch, b: PackedBatch) -> bool:
    """Equal in every field, bitwise, media included."""
    return (
        all(torch.equal(getattr(a, name), getattr(b, name)) for name in FIELDS)
        and a.media.keys() == b.media.keys()
        and all(torch.equal(a.media[name], b.media[name]) and a.media[name].dtype == b.media[name].dtype for name in a.media)
        and (a.media_rows, a.max_seqlen, a.source_keys, a.ages) == (b.media_rows, b.max_seqlen, b.source_keys, b.ages)
        and (a.left_out, a.__restore_key__) == (b.left_out, b.__restore_key__)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_media_cross_processes_and_devices(dtype: torch.dtype) -> None:
    row = vision_row(vision_sources("qwen3_vl"), multiple=4)
    row.media["pixel_values"] = row.media["pixel_values"].to(dtype)
    received = pickle.loads(ForkingPickler.dumps(row))
    assert same_row(row, received)
    received.media["pixel_values"][0] = 7  # not the same memory
    assert not same_row(row, received)
    assert same_row(row, row.to("cpu"))
    moved = row.to("meta")
    assert moved.media["pixel_values"].device.type == "meta"
    assert moved.media_rows == row.media_rows
    row.__restore_key__ = ("kept", 1)
    assert pickle.loads(ForkingPickler.dumps(row)).__restore_key__ == ("kept", 1)


def test_positions_of_gaps_and_of_chats_without_images() -> None:
    sources = vision_sources("qwen3_vl")
    row = vision_row(sources, multiple=8)
    for number, source in enumerate(sources):
        places = row.segment_ids[0] == number + 1
        assert row.position_ids[0, 0, places].tolist() == list(range(len(source)))
        assert torch.equal(row.position_ids[1:, 0, places], source.mrope)
    gaps = row.segment_ids[0] == 0
    assert bool(gaps.any())
    assert (row.position_ids[:, 0, gaps] == row.position_ids[0, 0, gaps]).all()
    assert int(row.position_ids[0, 0, gaps].max()) < 8
    # A row of chats without images has the same form.
    texts = vision_row_of_one_pack(vision_sources("qwen3_vl", (0, 0)))
    assert texts.position_ids.shape[:2] == (4, 1)
    assert texts.media == {}
    assert "pixel_values" not in texts.model_inputs()


def test_rows_that_cannot_be_are_refused() -> None:
    encoder = vision_encoder("qwen3_vl")
    waiting = encoder("waits", record(0, 1))
    policy = PackingPolicy(capacity=1024)
    with pytest.raises(ValueError, match=r"media of sample 'waits' are still to be made: give source.completed\(\)"):
        PackedBatch.from_packs([policy.build([waiting])], pad_id=0)
    a, b = waiting.completed(), vision_encoder("qwen2_vl")("other", record(0, 1)).completed()
    with pytest.raises(
        ValueError, match=r"pixel_values of sample 'other' is .*1176\], that of 'waits' in the same row .*1536\]"
    ):
        PackedBatch.from_packs([policy.build([a, b])], pad_id=0)


def test_a_row_with_images_is_not_cut_for_context_parallel_ranks() -> None:
    row = vision_row(vision_sources("qwen3_vl"), multiple=4)
    with pytest.raises(ValueError, match=r"the row has pixel_values, image_grid_thw, .* train with images on context=1"):
        ContextSlice.of(row, layout=ParallelLayout(context=2), rank=0)


def test_a_chat_with_images_is_never_cut() -> None:
    source: Any = vision_encoder("qwen3_vl")("long", record(0, 3))
    capacity = len(source) - 1
    (marker,) = PackingPolicy(capacity=capacity).admit(source)
    assert marker.left_out == ("long", "overlength", len(source))
    for rule in ("truncate", "split"):
        with pytest.raises(ValueError, match=rf"sample 'long' has .* and images, so overlength='{rule}' cannot cut it"):
            PackingPolicy(capacity=capacity, overlength=rule).admit(source)
    with pytest.raises(ValueError, match=f"sample 'long' has {len(source)} tokens, more than capacity={capacity}"):
        PackingPolicy(capacity=capacity, overlength="error").admit(source)
    assert isinstance(PackingPolicy(capacity=len(source)).build([source.completed()]), Pack)
