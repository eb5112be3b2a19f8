"""A small tokenizer of one's own: byte-level BPE with a ChatML template whose marks enclose what the assistant writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lightning_pack.encoders.tokenizer import no_fork_warning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Pad, start of turn, end of turn; they get the ids 0, 1 and 2.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

#: A turn is ``<|im_start|>ROLE``, a newline, the content, ``<|im_end|>`` and a newline.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{ message['content'] + '<|im_end|>' }}{%- endgeneration -%}
{%- else -%}
{{ message['content'] + '<|im_end|>' }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

#: Before and behind an image, its placeholder and that of a video; they get the ids 3 to 6.
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_PARTS = """\
{%- macro body(message) -%}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else -%}{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
#: The same for messages whose content is a list of parts, text and images.
VISION_CHAT_TEMPLATE = _PARTS + CHAT_TEMPLATE.replace("message['content']", "body(message)")


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, vision: bool = False) -> PreTrainedTokenizerFast:
    """Learn merges from ``texts``; every byte has a token, so no text is ever unknown.

    Args:
        texts: what to learn from; the same texts in the same order give the same tokenizer.
        vocab_size: number of tokens, with the 3 special tokens and 256 bytes; fewer come out where the texts are few.
        vision: with 4 special tokens more, and a template for messages with images.

    Raises:
        ValueError: if ``vocab_size`` has no place for the bytes and special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = (*SPECIAL_TOKENS, *(VISION_TOKENS if vision else ()))
    least = 256 + len(special)
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < least:
        raise ValueError(
            f"vocab_size={vocab_size!r}: a whole number of at least {least} is needed (256 bytes, "
            f"{len(special)} special tokens)"
        )
    no_fork_warning()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    pad, start, end, *others = special
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, additional_special_tokens=[start, *others]
    )
    wrapped.chat_template = VISION_CHAT_TEMPLATE if vision else CHAT_TEMPLATE
    return wrapped
