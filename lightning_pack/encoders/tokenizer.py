"""Loading a tokenizer from a folder, and telling whether two tokenizers are the same."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved in a local folder; nothing is downloaded and no code from the folder is run.

    Raises:
        ValueError: if there is no such folder, or no tokenizer in it.
    """
    folder = Path(path)
    if folder.is_file():
        raise ValueError(f"tokenizer={str(path)!r} is a file: give the folder that tokenizer.save_pretrained() wrote")
    if not folder.is_dir():
        raise ValueError(
            f"tokenizer folder {str(path)!r} does not exist: give a local folder that tokenizer.save_pretrained() wrote "
            "(a prepared dataset has one in its 'tokenizer' folder); nothing is downloaded"
        )
    from transformers import AutoTokenizer

    no_fork_warning()
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"no tokenizer can be loaded from {str(folder)!r} ({type(error).__name__}: {_first_line(error)}): "
            "write one there with tokenizer.save_pretrained()"
        ) from error


def _first_line(error: Exception) -> str:
    """Of an error that may go on with a list of everything that was tried."""
    return str(error).strip().partition("\n")[0].removesuffix(" from one of: ")[:300]


def no_fork_warning() -> None:
    """Keep the tokenizers library single-threaded, unless the user decided otherwise in ``TOKENIZERS_PARALLELISM``.

    One text at a time is encoded, so threads gain nothing; but once started they make every forked worker print a warning.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills gaps: the pad token's, else the end-of-sequence token's, else 0."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Content hashes of everything that decides which tokens a text becomes; the folder's name is not part of it.

    Padding and truncation are left out: sources are encoded alone and whole.
    """
    special = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items()) if isinstance(token, str)}
    return {
        "backend": content_hash(_backend(tokenizer)),
        "chat_template": None if tokenizer.chat_template is None else content_hash(tokenizer.chat_template),
        "special_tokens": {name: tokenizer.convert_tokens_to_ids(token) for name, token in special.items()},
        "vocab_size": len(tokenizer),
    }


def _backend(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    if not tokenizer.is_fast:
        return _slow_backend(tokenizer)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for passing in ("padding", "truncation"):
        state.pop(passing, None)
    return {**state, "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False))}


def _slow_backend(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A tokenizer written in Python: the files that it would save, its settings and its added tokens."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_vocabulary(folder)
        files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in Path(folder).iterdir()}
    settings = {
        name: value
        for name, value in tokenizer.init_kwargs.items()
        if isinstance(value, bool | int | float | str) and not name.endswith(("_file", "name_or_path", "chat_template"))
    }
    return {
        "class": type(tokenizer).__name__,
        "vocab": tokenizer.get_vocab(),
        "files": files,
        "settings": settings,
        "added": {str(number): repr(token) for number, token in tokenizer.added_tokens_decoder.items()},
    }


def content_hash(value: Any) -> str:
    """Equal for equal plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
