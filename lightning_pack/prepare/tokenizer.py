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


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn merges from ``texts``; every byte has a token, so no text is ever unknown.

    Args:
        texts: what to learn from; the same texts in the same order give the same tokenizer.
        vocab_size: number of tokens, with the 3 special tokens and 256 bytes; fewer come out where the texts are few.

    Raises:
        ValueError: if ``vocab_size`` has no place for the bytes and special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    least = 256 + len(SPECIAL_TOKENS)
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < least:
        raise ValueError(
            f"vocab_size={vocab_size!r}: a whole number of at least {least} is needed (256 bytes, 3 special tokens)"
        )
    no_fork_warning()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    pad, start, end = SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, additional_special_tokens=[start]
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
