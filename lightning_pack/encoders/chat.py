"""Chats: only what the assistant wrote is a target.

Which tokens those are is told by the tokenizer's chat template, in one of two ways:

* ``{% generation %}`` marks in the template enclose what the assistant writes, usually the answer and its end-of-turn mark;
* without marks, the chat is rendered up to and through each assistant turn. Where every such rendering begins the next, the
  difference is the assistant's text, whatever the template writes after an answer included. The whole chat is tokenized once,
  so the tokens are those of the plain rendering.

Templates that change earlier turns when later ones follow (some drop earlier reasoning) need the marks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lightning_pack.encoders.base import LeaveOut, TemplateError
from lightning_pack.encoders.messages import Message, read_messages
from lightning_pack.encoders.tokenizer import no_fork_warning, padding_id, tokenizer_fingerprint
from lightning_pack.source import IGNORE, EncodedSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TemplateValue: TypeAlias = str | int | float | bool | None

_PROBE: list[Message] = [
    {"role": "user", "content": "First question?"},
    {"role": "assistant", "content": "First answer."},
    {"role": "user", "content": "Second question?"},
    {"role": "assistant", "content": "Second answer."},
]
_SYSTEM: Message = {"role": "system", "content": "Some instruction."}
_WAYS_OUT = (
    "put {% generation %} and {% endgeneration %} around what the assistant writes in the template, or set another "
    "tokenizer.chat_template (in a saved tokenizer's folder the file chat_template.jinja)"
)
_NO_TEMPLATE = (
    "the tokenizer has no chat template: set tokenizer.chat_template, or use records with 'text'. On the command line, put the "
    "template in a file chat_template.jinja in the tokenizer's folder, or give the folder of a tokenizer that has one, as that "
    "of an instruction-tuned model (prepare, prepack and plan: --tokenizer DIR; fit: --data.tokenizer DIR)"
)


class ChatEncoder:
    """Encodes ``messages``, or ``prompt`` and ``completion``, by the tokenizer's chat template.

    Args:
        tokenizer: a fast transformers tokenizer with a chat template.
        template_kwargs: variables that the template uses, such as ``{"enable_thinking": False}``.

    Raises:
        TemplateError: if the template is missing, or a probe chat shows that it does not tell which tokens the assistant
            wrote, or that it writes today's date, so that the same record would give other tokens tomorrow.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, template_kwargs: Mapping[str, TemplateValue] | None = None
    ) -> None:
        no_fork_warning()
        self.tokenizer = tokenizer
        self.pad_id = padding_id(tokenizer)
        self.template_kwargs: dict[str, Any] = dict(template_kwargs or {})
        if not tokenizer.chat_template:
            raise TemplateError(_NO_TEMPLATE)
        if not tokenizer.is_fast:
            raise TemplateError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so the characters of a token are not known: "
                "convert it to a tokenizer.json and load that"
            )
        template = tokenizer.get_chat_template()
        unused = [name for name in self.template_kwargs if not re.search(rf"\b{re.escape(name)}\b", template)]
        if unused:
            raise TemplateError(f"template_kwargs {unused} do not occur in the chat template, so they would change nothing")
        self.marked = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
        self._probe(template)

    def __call__(self, key: str, record: Mapping[str, Any]) -> EncodedSource:
        """The chat's tokens and labels, int64 ``[L]`` each.

        Raises:
            LeaveOut: for a record that is no chat, that the template refuses, or that has no targets.
        """
        messages = read_messages(record)
        try:
            ids, targets, _ = self.tokens(messages)
        except Exception as error:
            # A template is a program that may fail in any way on one record, as on a system message that it does not know.
            raise LeaveOut("corrupt", f"the chat template fails on sample {key!r}: {error}", "chat template fails") from error
        input_ids = torch.tensor(ids, dtype=torch.int64)
        if not len(input_ids):
            raise LeaveOut("empty", f"sample {key!r} becomes no tokens", "no messages")
        source = EncodedSource.of(key, input_ids, input_ids.masked_fill(~torch.tensor(targets, dtype=torch.bool), IGNORE))
        if bool((source.labels == IGNORE).all()):
            raise LeaveOut("no_targets", f"no token of sample {key!r} is the assistant's")
        return source

    def fingerprint(self) -> dict[str, Any]:
        """Plain values that are equal exactly where the same chat gives the same tokens and targets."""
        return {
            "encoder": "chat",
            "targets": "marks" if self.marked else "prefixes",
            "template_kwargs": dict(sorted(self.template_kwargs.items())),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
        }

    def _render(self, messages: Sequence[Message], *, prompt: bool = False, **more: TemplateValue) -> str:
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt, **{**self.template_kwargs, **more}
        )
        assert isinstance(text, str)
        return text

    def tokens(self, messages: Sequence[Message]) -> tuple[list[int], list[bool], list[tuple[int, int]]]:
        """Ids, whether each is a target, and the characters that each covers."""
        if self.marked:
            encoded: Any = self.tokenizer.apply_chat_template(
                list(messages),
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
                **self.template_kwargs,
            )
            return encoded["input_ids"], [bool(mark) for mark in encoded["assistant_masks"]], encoded["offset_mapping"]
        text, spans = self._spans(messages)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = encoded["offset_mapping"]
        return encoded["input_ids"], _inside(offsets, spans), offsets

    def _spans(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The rendered chat and, for each assistant turn, its first and past-the-last character."""
        text = self._render(messages)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, through = self._render(messages[:index], prompt=True), self._render(messages[: index + 1])
            if not (text.startswith(through) and through.startswith(before)):
                raise TemplateError(
                    "the chat template has no generation marks, and its text up to an assistant turn is not the beginning of "
                    f"the whole text (message {index + 1} of {len(messages)}), so what it wrote is unknown: {_WAYS_OUT}"
                )
            spans.append((len(before), len(through)))
        return text, spans

    def _probe(self, template: str) -> None:
        try:
            text = self._render(_PROBE)
        except Exception as error:
            raise TemplateError(f"the chat template fails on a chat of two turns ({error}): {_WAYS_OUT}") from error
        self._check(_PROBE, text)
        if "strftime_now" in template:
            try:
                # transformers passes no functions to a template, so a template that asks for the date fails here.
                self._render(_PROBE, strftime_now="")
            except Exception as error:
                raise TemplateError(
                    "the chat template writes today's date (strftime_now), so tomorrow a record would give other tokens: write "
                    "a fixed date in the template, or give the variable that it looks for first, as in "
                    "template_kwargs={'date_string': '26 Jul 2024'}"
                ) from error
        try:
            text = self._render([_SYSTEM, *_PROBE])
        except Exception:
            # The template refuses system messages. Records that have one are left out, with the template's words.
            return
        self._check([_SYSTEM, *_PROBE], text)

    def _check(self, messages: Sequence[Message], text: str) -> None:
        """Compare the targets of a probe chat with who wrote what.

        Raises:
            TemplateError: if they differ.
        """
        _, targets, offsets = self.tokens(messages)
        pieces = _pieces(text, offsets, targets)
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        found = len(pieces) == len(answers) and all(answer in piece for answer, piece in zip(answers, pieces, strict=True))
        foreign = any(m["content"] in piece for m in messages if m["role"] != "assistant" for piece in pieces)
        headed = not self.marked and not all(
            piece.lstrip().startswith(answer) for answer, piece in zip(answers, pieces, strict=False)
        )
        if not found or foreign or headed:
            raise TemplateError(
                f"by the chat template the assistant wrote {pieces} in a chat where it wrote {answers}, so the targets would "
                f"be wrong: {_WAYS_OUT}"
            )


def _inside(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Whether each token lies entirely in one of the spans; both are in order. A token of no characters must be well inside."""
    inside, at = [], 0
    for first, last in offsets:
        while at < len(spans) and first >= spans[at][1]:
            at += 1
        start, end = spans[at] if at < len(spans) else (0, 0)
        inside.append(start <= first < end and start < last <= end)
    return inside


def _pieces(text: str, offsets: Sequence[tuple[int, int]], targets: Sequence[bool]) -> list[str]:
    """The text under each run of targets."""
    pieces: list[str] = []
    begun = None
    for (first, _), target, (_, last) in zip(offsets, targets, offsets, strict=True):
        if target and begun is None:
            begun = first
        if target:
            end = last
        if begun is not None and not target:
            pieces.append(text[begun:end])
            begun = None
    return pieces if begun is None else [*pieces, text[begun:end]]
