"""Chats with images: exact lengths from image sizes, assistant-only targets, pixels when a pack is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_pack.encoders.base import LeaveOut
from lightning_pack.encoders.chat import ChatEncoder, TemplateValue
from lightning_pack.encoders.families import VisionFamily, vision_family
from lightning_pack.encoders.image_parts import read_image_chat
from lightning_pack.encoders.image_processor import image_processor_fingerprint, load_image_processor
from lightning_pack.encoders.image_reader import ImageReader
from lightning_pack.encoders.images import EncodedImage
from lightning_pack.encoders.tokenizer import load_tokenizer
from lightning_pack.encoders.vision_checks import check_image_processor, check_template, known_token
from lightning_pack.media import MediaFile
from lightning_pack.source import IGNORE, EncodedSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class VisionChatEncoder:
    """Encodes chats whose messages have image parts, for a vision-language model; chats without images too.

    Each placeholder that the chat template writes becomes as many as the image has tokens, which follows from its size: only
    headers are read until the source is in a pack. Then its pixels are decoded and processed. Targets are what the assistant
    wrote, never a placeholder. See :mod:`lightning_pack.encoders.image_parts` for the records.

    A source is never cut: one that is longer than the capacity is left out, or ends the run under ``overlength="error"``.

    Args:
        tokenizer: a fast transformers tokenizer with a chat template, or the folder of one.
        image_processor: a transformers image processor that tells the number of patches of an image from its size, or the
            folder of one; None takes the folder of the tokenizer.
        family: name of a registered family, such as ``"qwen2_vl"``, ``"qwen2_5_vl"`` or ``"qwen3_vl"``.
        template_kwargs: variables passed to the chat template, see :class:`ChatEncoder`.
        image_root: folder that relative paths start from; None is that of the ``.jsonl`` file.
        group_by: a field of the records: sources that differ in it do not share a pack.

    Raises:
        TemplateError: if the template does not write one placeholder for each image, or does not tell what the assistant wrote.
        ValueError: for an unknown family, a folder without a tokenizer or an image processor, and an image processor that does
            not fit the family.

    Example:
        A transformers Processor has both parts::

            VisionChatEncoder(processor.tokenizer, processor.image_processor, family="qwen3_vl")
    """

    #: The task encoder hands on the files of a sample, and policies may limit media.
    has_media = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | str | Path,
        image_processor: Any | str | Path | None = None,
        *,
        family: str,
        template_kwargs: Mapping[str, TemplateValue] | None = None,
        image_root: str | Path | None = None,
        group_by: str | None = None,
    ) -> None:
        self.family: VisionFamily = vision_family(family)
        if image_processor is None:
            if not isinstance(tokenizer, str | Path):
                raise ValueError(
                    "image_processor=None with a tokenizer that is loaded: give the image processor too, or folders of both"
                )
            image_processor = tokenizer
        processor: Any = image_processor
        if isinstance(image_processor, str | Path):
            processor = load_image_processor(image_processor)
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        self.image_processor = processor
        self._chat = ChatEncoder(self.tokenizer, template_kwargs=template_kwargs)
        self.pad_id = self._chat.pad_id
        self._image_root = None if image_root is None else str(image_root)
        self.group_by = group_by
        self.image_token_id = known_token(self.tokenizer, self.family)
        #: What is done with images, whoever wrote the chat.
        self.images = ImageReader(processor, self.family, self.image_token_id)
        vocabulary = self.tokenizer.get_vocab()
        self._refused = {vocabulary[token]: token for token in self.family.other_media_tokens if token in vocabulary}
        check_image_processor(self.image_processor, self.family)
        check_template(self._chat, self.family, image_token_id=self.image_token_id)

    def __call__(self, key: str, record: Mapping[str, Any]) -> EncodedSource:
        """The chat's tokens and labels, int64 ``[L]`` each; its images are deferred.

        Raises:
            LeaveOut: for a record that is no chat, whose images do not match its messages or cannot be measured, or that has no
                targets.
        """
        try:
            return self._source(key, record)
        except LeaveOut as error:
            if repr(key) in str(error):
                raise
            raise LeaveOut(error.reason, f"sample {key!r}: {error}", error.problem) from error

    def _source(self, key: str, record: Mapping[str, Any]) -> EncodedSource:
        messages, images = read_image_chat(record, key=key, image_root=self._image_root)
        try:
            ids, targets, _ = self._chat.tokens(messages)
        except Exception as error:
            # A template is a program that may fail in any way on one record.
            raise LeaveOut("corrupt", f"the chat template fails on sample {key!r}: {error}", "chat template fails") from error
        short = torch.tensor(ids, dtype=torch.int64)
        if not len(short):
            raise LeaveOut("empty", f"sample {key!r} becomes no tokens", "no messages")
        self._check_placeholders(key, short, images)
        sizes = [self.images.size(image) for image in images]
        tokens = [size.tokens for size in sizes]
        times = torch.ones_like(short)
        times[short == self.image_token_id] = torch.tensor(tokens, dtype=torch.int64)
        input_ids = short.repeat_interleave(times)
        # A placeholder is never predicted, also where the assistant shows an image.
        wanted = (torch.tensor(targets, dtype=torch.bool) & (short != self.image_token_id)).repeat_interleave(times)
        source = EncodedSource.of(key, input_ids, input_ids.masked_fill(~wanted, IGNORE))
        if bool((source.labels == IGNORE).all()):
            raise LeaveOut("no_targets", f"no token of sample {key!r} is the assistant's")
        if self.group_by is not None and record.get(self.group_by) is not None:
            source.group = str(record[self.group_by])
        return self.images.attached(source, images, sizes)

    def files_of(self, source: EncodedSource) -> list[MediaFile]:
        """The images of a source that was just encoded, as their files are.

        Raises:
            LeaveOut: as ``image``, if one cannot be read.
        """
        return self.images.files_of(source)

    def with_files(self, source: EncodedSource, files: Sequence[MediaFile]) -> EncodedSource:
        """The source as it was encoded, from one that has its tokens and labels alone, and its image files."""
        return self.images.with_files(source, files)

    def fingerprint(self) -> dict[str, Any]:
        """Plain values that are equal exactly where the same chat and images give the same tokens, targets and pixels."""
        return {
            **self._chat.fingerprint(),
            "encoder": "vision_chat",
            "family": self.family.name,
            "image_token": self.family.image_token,
            "image_processor": image_processor_fingerprint(self.image_processor),
            "group_by": self.group_by,
        }

    def _check_placeholders(self, key: str, ids: Tensor, images: Sequence[EncodedImage]) -> None:
        found = int((ids == self.image_token_id).sum())
        if found != len(images):
            raise LeaveOut(
                "corrupt",
                f"sample {key!r} has {len(images)} images, but {found} placeholders {self.family.image_token!r}: no text may "
                "contain the placeholder",
                "placeholders do not match",
            )
        foreign = [token for number, token in self._refused.items() if bool((ids == number).any())]
        if foreign:
            raise LeaveOut(
                "corrupt", f"sample {key!r} has {foreign[0]!r} in its text: only images are supported", "other placeholder"
            )
