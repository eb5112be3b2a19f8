"""Plain text: every token is a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_pack.encoders.base import LeaveOut
from lightning_pack.encoders.messages import read_text
from lightning_pack.encoders.tokenizer import no_fork_warning, padding_id, tokenizer_fingerprint
from lightning_pack.source import EncodedSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PlainTextEncoder:
    """Encodes the ``text`` of a record, which ``overlength="split"`` may cut in pieces.

    A beginning-of-sequence token comes first where the tokenizer adds one by itself, and the end-of-sequence token, where
    there is one, comes last. All tokens but the first are targets.

    Args:
        tokenizer: any transformers tokenizer; it needs no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        no_fork_warning()
        self.tokenizer = tokenizer
        self.pad_id = padding_id(tokenizer)
        own = tokenizer("a")["input_ids"]
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._first = [bos] if bos is not None and own[:1] == [bos] else []
        self._last = [] if eos is None else [eos]

    def __call__(self, key: str, record: Mapping[str, Any]) -> EncodedSource:
        """The text's tokens, int64 ``[L]``.

        Raises:
            LeaveOut: if there is no text, or nothing of it is a target.
        """
        text = read_text(record)
        tokens = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        if not tokens:
            raise LeaveOut("empty", f"the text of sample {key!r} becomes no tokens", "empty text")
        ids = [*self._first, *tokens, *self._last]
        if len(ids) < 2:
            raise LeaveOut("no_targets", f"the text of sample {key!r} is a single token, and the first is never a target")
        source = EncodedSource.of(key, torch.tensor(ids, dtype=torch.int64))
        source.splittable = True
        return source

    def fingerprint(self) -> dict[str, Any]:
        """Plain values that are equal exactly where the same text gives the same tokens."""
        tokenizer = tokenizer_fingerprint(self.tokenizer)
        del tokenizer["chat_template"]  # not used here
        return {"encoder": "text", "tokenizer": tokenizer}
