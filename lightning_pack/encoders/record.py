"""Chats and plain texts in one dataset: the encoder is chosen by a record's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_pack.encoders.chat import ChatEncoder, TemplateValue
from lightning_pack.encoders.messages import read_record
from lightning_pack.encoders.text import PlainTextEncoder
from lightning_pack.encoders.tokenizer import tokenizer_fingerprint
from lightning_pack.source import EncodedSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RecordEncoder:
    """Encodes ``messages``, or ``prompt`` and ``completion``, as a chat, and ``text`` as a plain text.

    A tokenizer without a chat template serves for plain texts; the first chat then stops with a :class:`TemplateError`.

    Args:
        tokenizer: a transformers tokenizer; if it has a chat template, that is checked at once.
        template_kwargs: variables passed to the chat template, see :class:`ChatEncoder`.
        group_by: a field of the records, such as ``"language"``: sources that differ in it do not share a pack. Those without
            it share packs with each other.

    Raises:
        TemplateError: if there is a chat template, but it does not tell which tokens the assistant wrote.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_kwargs: Mapping[str, TemplateValue] | None = None,
        group_by: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.group_by = group_by
        self._text = PlainTextEncoder(tokenizer)
        self._chat = (
            ChatEncoder(tokenizer, template_kwargs=template_kwargs) if tokenizer.chat_template or template_kwargs else None
        )
        self.pad_id = self._text.pad_id

    def __call__(self, key: str, record: Mapping[str, Any]) -> EncodedSource:
        """The record's tokens and labels, int64 ``[L]`` each.

        Raises:
            LeaveOut: for a record that cannot be trained on.
            TemplateError: for a chat, if the tokenizer has no chat template.
        """
        if isinstance(read_record(record), str):
            source = self._text(key, record)
        else:
            if self._chat is None:
                self._chat = ChatEncoder(self.tokenizer)
            source = self._chat(key, record)
        if self.group_by is not None and record.get(self.group_by) is not None:
            source.group = str(record[self.group_by])
        return source

    def fingerprint(self) -> dict[str, Any]:
        """Plain values that are equal exactly where the same record gives the same tokens."""
        chat = {} if self._chat is None else self._chat.fingerprint()
        return {
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            **chat,
            "encoder": "record",
            "group_by": self.group_by,
        }
