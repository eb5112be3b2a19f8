"""The encoder for image-text chats: against transformers' own processor and positions, and what it leaves out."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps
from transformers import Qwen2_5_VLProcessor, Qwen3VLProcessor

from lightning_pack.encoders import LeaveOut, MediaRecord, TemplateError, VisionChatEncoder, mrope_positions
from lightning_pack.encoders.images import EncodedImage, is_image_name
from lightning_pack.source import IGNORE, EncodedSource
from tests.tiny_vision import chat, image_processor, picture, sample, vision_encoder, vision_model, vision_tokenizer

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def record(seed: int = 0, images: int = 3, **options: Any) -> MediaRecord:
    members = sample(seed, images, **options)
    fields = json.loads(members.pop("json"))
    return MediaRecord(fields, files=members, folder=None)


def with_messages(content: Any, *, files: dict[str, bytes] | None = None, **fields: Any) -> MediaRecord:
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "A cat."}]
    return MediaRecord({"messages": messages, **fields}, files=files or {}, folder=None)


@pytest.mark.parametrize("images", [0, 1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_the_model(family: str, images: int) -> None:
    encoder = vision_encoder(family)
    source = encoder("a", record(3, images)).completed()
    ids = source.input_ids[None]
    grids = source.media.get("image_grid_thw")
    if images > 1:
        assert len({tuple(grid) for grid in grids.tolist()}) > 1
    kinds = (ids == encoder.image_token_id).int()
    expected, _ = vision_model(family).model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
    assert torch.equal(source.mrope, expected[:, 0])
    if images > 1:
        # The text behind an image goes on from less than its place.
        assert source.mrope[0, -1] < len(source) - 1


def test_images_without_text_between_them_have_positions_of_their_own() -> None:
    ids, grids = torch.tensor([9] * 4 + [9] * 2), torch.tensor([[1, 4, 4], [1, 2, 4]])
    found = mrope_positions(ids, grids, image_token_id=9, merge_size=2)
    assert found.tolist() == [[0, 0, 0, 0, 2, 2], [0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 2, 3]]
    with pytest.raises(ValueError, match="5 placeholders for 2 images of 6 tokens"):
        mrope_positions(ids[:5], grids, image_token_id=9, merge_size=2)


def without_video(base: type, family: str) -> Any:
    """A processor of transformers that needs no torchvision."""

    class WithoutVideo(base):  # type: ignore[misc, valid-type]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    return WithoutVideo(image_processor(family), vision_tokenizer(), chat_template=vision_tokenizer().chat_template)


@pytest.mark.parametrize(("family", "base"), [("qwen2_5_vl", Qwen2_5_VLProcessor), ("qwen3_vl", Qwen3VLProcessor)])
def test_everything_equals_the_processor_of_transformers(family: str, base: type) -> None:
    processor = without_video(base, family)
    encoder = VisionChatEncoder(processor.tokenizer, processor.image_processor, family=family)
    given = record(2, 3)
    pictures = iter([Image.open(io.BytesIO(content)).convert("RGB") for content in given.files.values()])
    messages = json.loads(json.dumps(given["messages"]))
    for message in messages:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        for part in message["content"]:
            if part["type"] == "image":
                part["image"] = next(pictures)
    expected = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
    )
    source = encoder("a", given)
    assert source.media == {}
    assert source.deferred is not None
    assert source.held_media == sum(map(len, given.files.values()))
    tokens, nbytes = source.media_tokens, source.media_bytes
    source = source.completed()
    assert source.input_ids.tolist() == expected["input_ids"][0].tolist()
    assert (source.labels != IGNORE).tolist() == [bool(mark) for mark in torch.as_tensor(expected["assistant_masks"])[0]]
    assert torch.equal(source.media["pixel_values"], expected["pixel_values"])
    assert torch.equal(source.media["image_grid_thw"], expected["image_grid_thw"])
    # What was said before a pixel was decoded is exact.
    assert tokens == source.media_tokens == int((source.input_ids == encoder.image_token_id).sum())
    assert nbytes == source.media_bytes == sum(tensor.nbytes for tensor in source.media.values())


def test_targets_with_and_without_marks_are_the_assistants_words() -> None:
    marked, unmarked = (
        VisionChatEncoder(vision_tokenizer(marked=marked), image_processor("qwen3_vl"), family="qwen3_vl")("a", record(1, 3))
        for marked in (True, False)
    )
    tokenizer = vision_tokenizer()
    said = [tokenizer.decode(source.labels[source.labels != IGNORE]) for source in (marked, unmarked)]
    assert said[0] == "It shows a cat and a horse. " * 2 + "<|im_end|>The first is brighter, 1.<|im_end|>"
    # Without marks the line break behind an answer is the assistant's.
    assert said[1] == said[0].replace("<|im_end|>", "<|im_end|>\n")


def test_an_image_that_the_assistant_shows_is_no_target() -> None:
    given = record(0, 1)
    given["messages"][1]["content"] = [{"type": "image"}, {"type": "text", "text": "Here."}]
    given.files["1.png"] = picture(1)
    encoder = vision_encoder()
    source = encoder("a", given)
    assert int((source.input_ids == encoder.image_token_id).sum()) == source.media_tokens > 4
    assert not (source.labels == encoder.image_token_id).any()
    assert "Here." in encoder.tokenizer.decode(source.labels[source.labels != IGNORE])


@pytest.mark.parametrize("field", ["image", "path", "url"])
def test_names_of_images(field: str, tmp_path: Any) -> None:
    content = picture(4)
    (tmp_path / "there.png").write_bytes(content)
    address = "data:image/png;base64," + base64.b64encode(content).decode()
    expected = vision_encoder()("a", with_messages([{"type": "image"}], files={"x.png": content})).completed()
    encoder = vision_encoder(image_root=tmp_path)
    forms: list[tuple[Any, dict[str, bytes]]] = [
        ({"type": "image", field: "x.png"}, {"x.png": content}),
        ({"type": "image", field: "there.png"}, {}),
        ({"type": "image", field: str(tmp_path / "there.png")}, {}),
        ({"type": "image", field: address}, {}),
        ({"type": "image_url", "image_url": {"url": address}}, {}),
        ({"type": "image_url", "image_url": {"url": address, "detail": "auto"}}, {}),
    ]
    for part, files in forms:
        source = encoder("a", with_messages([part], files=files))
        assert (source.held_media > 0) == (bool(files) or "there" not in str(part))
        assert torch.equal(source.completed().media["pixel_values"], expected.media["pixel_values"])
    for given in (content, Image.open(io.BytesIO(content)), np.array(Image.open(io.BytesIO(content)))):
        found = encoder("a", with_messages([{"type": "image"}], images=[given])).completed()
        assert torch.equal(found.media["pixel_values"], expected.media["pixel_values"])


def test_what_is_asked_of_an_image_and_not_done_leaves_the_source_out() -> None:
    part = {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}
    with pytest.raises(LeaveOut, match=r"an 'image_url' with \{'detail': 'low'\}, which is not used") as caught:
        vision_encoder()("a", with_messages([part], files={"a.png": picture(0)}))
    assert (caught.value.reason, caught.value.problem) == ("corrupt", "unused fields")


def test_named_images_and_the_rest_in_order() -> None:
    encoder = vision_encoder()
    files = {"0.png": picture(0), "1.png": picture(1), "2.png": picture(2)}
    grids = {name: encoder("a", with_messages([{"type": "image"}], files={name: files[name]})) for name in files}
    wanted = [grids[name].completed().media["image_grid_thw"][0].tolist() for name in ("2.png", "0.png", "1.png")]
    assert len({tuple(grid) for grid in wanted}) == 3
    parts = [{"type": "image", "image": "2.png"}, {"type": "image"}, {"type": "image"}]
    found = encoder("a", with_messages(parts, files=files)).completed()
    assert found.media["image_grid_thw"].tolist() == wanted
    # As they are called in the shard.
    parts[0]["image"] = "some-key.2.png"
    again = encoder("some-key", with_messages(parts, files=files, images=["some-key.0.png", "1.png"])).completed()
    assert again.media["image_grid_thw"].tolist() == wanted


@pytest.mark.parametrize("ending", ["jfif", "JPE", "pixels", "a.v2"])
def test_any_ending_is_an_image_if_it_is_named(ending: str) -> None:
    content, encoder = picture(0, kind="JPEG"), vision_encoder()
    files = {f"0.{ending}": content, "notes": b"of the photographer"}
    expected = encoder("a", with_messages(IMAGE, files={"0.jpg": content})).completed().media["pixel_values"]
    named = with_messages([{"type": "image", "image": f"0.{ending}"}], files=files)
    listed = with_messages(IMAGE, files=files, images=[f"a.0.{ending}"])
    for given in (named, listed):
        assert torch.equal(encoder("a", given).completed().media["pixel_values"], expected)
    unnamed = with_messages(IMAGE, files=files)
    if is_image_name(f"0.{ending}"):
        assert torch.equal(encoder("a", unnamed).completed().media["pixel_values"], expected)
        return
    with pytest.raises(LeaveOut, match=rf"brings none .* \(and \['0.{ending}', 'notes'\], which would be images if they were"):
        encoder("a", unnamed)
    with pytest.raises(LeaveOut, match="'notes' is not an image that Pillow can read") as caught:
        encoder("a", with_messages([{"type": "image", "image": "notes"}], files=files))
    assert caught.value.reason == "image"


TURNED = io.BytesIO()
_exif = Image.Exif()
_exif[0x0112] = 6
Image.open(io.BytesIO(picture(3))).save(TURNED, format="JPEG", exif=_exif)


def test_a_turned_photograph_is_measured_as_it_is_seen() -> None:
    image = EncodedImage("turned", content=TURNED.getvalue())
    height, width = image.size()
    assert (width, height) == Image.open(TURNED).size[::-1]
    assert image.decoded().size == (width, height)
    source = vision_encoder()("a", with_messages([{"type": "image"}], files={"a.jpg": TURNED.getvalue()}))
    _, grid_height, grid_width = source.completed().media["image_grid_thw"][0].tolist()
    assert grid_height > grid_width


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_as_pillow_does(orientation: int) -> None:
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.open(io.BytesIO(picture(3))).save(file, format="JPEG", exif=exif)
    image = EncodedImage("turned", content=file.getvalue())
    expected = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
    assert np.array_equal(image.decoded(), expected)
    assert image.size() == expected.size[::-1]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_a_size_costs_no_decoding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = EncodedImage("any", content=picture(2, kind=kind))

    def refuse(*_: Any) -> None:
        raise AssertionError("the pixels are decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    assert image.size() == (180, 66)
    with pytest.raises(AssertionError, match="the pixels are decoded"):
        image.decoded()


@pytest.mark.parametrize("mode", ["L", "RGBA", "1", "P", "CMYK"])
def test_modes_that_become_rgb(mode: str) -> None:
    content = picture(1, mode=mode, kind="TIFF")
    source = vision_encoder()("a", with_messages([{"type": "image"}], files={"a.tif": content})).completed()
    assert source.media["pixel_values"].shape[1] == 1536


def _float_tiff() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).random((64, 64), dtype=np.float32)).save(file, format="TIFF")
    return file.getvalue()


IMAGE = [{"type": "image"}]
NOT_AN_IMAGE = r"image 'a.png' is not an image that Pillow can read \(here it reads .*GIF, JPEG, .*PNG.* and more\)$"
WRONG: dict[str, tuple[Any, dict[str, bytes], dict[str, Any], str, str]] = {
    "no image": (IMAGE, {}, {}, "corrupt", "1 image parts .* name no image, and the sample brings none"),
    "image too many": (IMAGE, {"a.png": picture(0), "b.png": picture(1)}, {}, "corrupt", "1 image parts"),
    "list too short": ([*IMAGE, *IMAGE], {}, {"images": ["a.png"]}, "corrupt", "2 image parts .* the record lists 1"),
    "unseen": (
        IMAGE,
        {"a.png": picture(0), "b.png": picture(1), "c.png": picture(2)},
        {"images": ["sample-7.b.png"]},
        "corrupt",
        r"brings the images \['a.png', 'c.png'\], and neither",
    ),
    "missing": ([{"type": "image", "image": "b.png"}], {"a.png": picture(0)}, {}, "corrupt", "0 image parts"),
    "missing file": ([{"type": "image", "image": "/nowhere/b.png"}], {}, {}, "image", "no file '/nowhere/b.png'"),
    "relative": ([{"type": "image", "image": "b.png"}], {}, {}, "image", "needs a .jsonl file to start from, or image_root="),
    "broken bytes": (IMAGE, {"a.png": b"no image at all"}, {}, "image", NOT_AN_IMAGE),
    "empty file": (IMAGE, {"a.png": b""}, {}, "image", NOT_AN_IMAGE),
    "long": (IMAGE, {"a.png": picture(0, size=(10, 2020))}, {}, "image", "10 x 2020 pixels is refused: .*aspect ratio"),
    "16 bit": (IMAGE, {"a.tif": _float_tiff()}, {}, "image", "mode 'F', not 8 bits a channel"),
    "float array": (IMAGE, {}, {"images": [np.random.default_rng(0).random((64, 64, 3))]}, "image", "scale its values again"),
    "float tensor": (IMAGE, {}, {"images": [torch.rand(3, 64, 64)]}, "image", "torch.*Tensor|Tensor of float32"),
    "zero size": (IMAGE, {}, {"images": [np.zeros((0, 64, 3), dtype=np.uint8)]}, "image", r"shape \[0, 64, 3\]"),
    "web": ([{"type": "image", "url": "https://example.com/a.png"}], {}, {}, "corrupt", "nothing is downloaded"),
    "video": ([{"type": "video", "video": "a.mp4"}], {}, {}, "corrupt", "part 1 .* is a video, .* give its frames as images"),
    "text": ("What <|image_pad|> is this?", {}, {}, "corrupt", "0 images, but 1 placeholders '<|image_pad|>'"),
    "other text": ("What <|video_pad|> is this?", {}, {}, "corrupt", "'<|video_pad|>' in its text"),
    "unknown part": ([{"type": "sound"}], {}, {}, "corrupt", "the type 'sound', not 'text' or 'image'"),
    "blank": ([{"type": "text", "text": "  "}], {}, {}, "empty", "is blank"),
    "base64": ([{"type": "image", "image": "data:image/png;base64,!!"}], {}, {}, "image", "base64 that is broken"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_with_the_key_and_leaves_out_the_source(case: str) -> None:
    content, files, fields, reason, message = WRONG[case]
    with pytest.raises(LeaveOut, match=message.replace("|>", r"\|>").replace("<|", r"<\|")) as caught:
        vision_encoder()("sample-7", with_messages(content, files=files, **fields))
    assert caught.value.reason == reason
    assert "'sample-7'" in str(caught.value)
    # The same text in every run.
    assert " at 0x" not in str(caught.value)


def test_a_file_that_ends_too_early_is_noticed_when_it_is_decoded() -> None:
    content = picture(0, kind="JPEG", size=(200, 200))
    source = vision_encoder()("late", with_messages(IMAGE, files={"a.jpg": content[: len(content) // 2]}))
    assert source.media_tokens > 0
    with pytest.raises(LeaveOut, match=r"sample 'late': image 'a.jpg' cannot be read .*truncated") as caught:
        source.completed()
    assert caught.value.reason == "image"


def test_a_file_that_changes_while_it_waits_is_noticed(tmp_path: Any) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(picture(0))
    source = vision_encoder()("late", with_messages([{"type": "image", "image": str(path)}]))
    path.write_bytes(picture(2))
    with pytest.raises(LeaveOut, match=r"sample 'late': its images became \[\d+\] tokens, but by their headers"):
        source.completed()


def test_the_fingerprint_tells_encoders_apart() -> None:
    def fingerprint(**changes: Any) -> str:
        family = changes.pop("family", "qwen3_vl")
        tokenizer = vision_tokenizer(marked=changes.pop("marked", True))
        group_by = changes.pop("group_by", None)
        processor = image_processor("qwen3_vl", **changes)
        encoder = VisionChatEncoder(tokenizer, processor, family=family, group_by=group_by)
        return json.dumps(encoder.fingerprint(), sort_keys=True)

    assert fingerprint() == fingerprint()
    others = [
        {"family": "qwen2_vl"}, {"marked": False}, {"image_mean": [0.5] * 3}, {"group_by": "kind"},
        {"size": {"shortest_edge": 1024, "longest_edge": 4096}},
    ]  # fmt: skip
    assert len({fingerprint(), *(fingerprint(**other) for other in others)}) == 6


def test_folders_give_the_same_encoder(tmp_path: Any) -> None:
    vision_tokenizer().save_pretrained(tmp_path)
    image_processor("qwen3_vl").save_pretrained(tmp_path)
    encoder = VisionChatEncoder(tmp_path, family="qwen3_vl")
    assert encoder.fingerprint() == vision_encoder().fingerprint()
    # Also as a Processor saves both.
    without_video(Qwen3VLProcessor, "qwen3_vl").save_pretrained(tmp_path / "processor")
    assert not (tmp_path / "processor" / "preprocessor_config.json").exists()
    assert VisionChatEncoder(tmp_path / "processor", family="qwen3_vl").fingerprint() == encoder.fingerprint()
    with pytest.raises(ValueError, match="does not exist: give a local folder"):
        VisionChatEncoder(vision_tokenizer(), tmp_path / "no", family="qwen3_vl")


def test_setups_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="vision family 'qwen9' is not known, but 'qwen2_5_vl', 'qwen2_vl', 'qwen3_vl' are"):
        VisionChatEncoder(vision_tokenizer(), image_processor("qwen3_vl"), family="qwen9")
    with pytest.raises(ValueError, match="is no image processor of family 'qwen3_vl'"):
        VisionChatEncoder(vision_tokenizer(), object(), family="qwen3_vl")
    unresized = image_processor("qwen3_vl", do_resize=False, patch_size=5, size={"shortest_edge": 1, "longest_edge": 1024})
    with pytest.raises(ValueError, match=r"90 x 70 pixels becomes \d+ tokens .* but its size says .*: lengths would be wrong"):
        VisionChatEncoder(vision_tokenizer(), unresized, family="qwen3_vl")
    with pytest.raises(ValueError, match="does not give pixel_values, image_grid_thw of family 'qwen3_vl' for an image"):
        VisionChatEncoder(vision_tokenizer(), image_processor("qwen3_vl", do_resize=False), family="qwen3_vl")
    with pytest.raises(ValueError, match="image_processor=None with a tokenizer that is loaded"):
        VisionChatEncoder(vision_tokenizer(), family="qwen3_vl")
    tokenizer = vision_tokenizer()
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = template.replace("<|image_pad|>", "")
        with pytest.raises(TemplateError, match=r"writes '<\|image_pad\|>' 0 times for 2 images"):
            vision_encoder()
    finally:
        tokenizer.chat_template = template


def test_a_chat_without_images_is_a_source_like_any_other() -> None:
    source = vision_encoder()("a", {"prompt": "What is a cat?", "completion": "A cat."})
    assert isinstance(source, EncodedSource)
    assert not source.has_media
    assert source.mrope.tolist() == [list(range(len(source)))] * 3
    assert source.held == 24 * len(source)
    assert chat(0, 0)["messages"]
