"""A real dataset that is on every machine: the documentation of Python's own standard library, as questions and answers.

Docstrings of public functions, classes and methods are short with a long tail (a median of some 80 tokens), and the topics of
``help()`` are long documents, up to some 15,000 tokens: just the mix of lengths that packing is for. Sources are parsed, not
imported.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import platform
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_pack.encoders import RecordEncoder
from lightning_pack.location import is_remote, location
from lightning_pack.prepare.dataset import DatasetWriter
from lightning_pack.prepare.progress import progress_bar
from lightning_pack.prepare.result import LengthSampler, PreparedDataset, check_output
from lightning_pack.prepare.tokenizer import train_tokenizer

#: Docstrings up to this many characters say too little.
SHORTEST = 40
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "pydoc_data"}
_QUESTIONS = {
    "function": ("What does {name} do?", "How do I use the function {name}?", "Explain {name} from Python's standard library."),
    "class": ("What is {name}?", "What is the class {name} for?", "Explain {name} from Python's standard library."),
    "method": ("What does the method {name} do?", "How do I use {name}?", "Explain {name} from Python's standard library."),
    "topic": (
        "What does Python's help say about {name}?",
        "Explain the Python topic {name}.",
        "Tell me all about {name} in Python.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One documented thing."""

    #: Qualified name, as ``json.decoder.JSONDecoder.decode``.
    name: str
    #: ``"function"``, ``"class"``, ``"method"`` or ``"topic"``.
    kind: str
    #: Signature, where there is one, and cleaned docstring.
    answer: str

    @property
    def key(self) -> str:
        """Sample key; unique, because ``-`` is in no name of Python."""
        return self.name.replace(".", "-")

    def record(self) -> dict[str, Any]:
        """A chat of one turn; how the question is put depends on the name alone."""
        wordings = _QUESTIONS[self.kind]
        wording = wordings[hashlib.sha256(self.name.encode()).digest()[0] % len(wordings)]
        question = wording.format(name=self.name.removeprefix("topics."))
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": self.answer}]}


def prepare_stdlib(
    out: str | Path,
    *,
    vocab_size: int = 4096,
    shards: int = 8,
    val_fraction: float = 0.05,
    overwrite: bool = False,
    progress: bool = True,
) -> PreparedDataset:
    """Prepare the running Python's documentation in folder ``out``, with a tokenizer trained on it.

    Args:
        out: destination; absent, empty, or a dataset prepared before. ``msc://PROFILE/...`` is a folder in an object
            store, to which the dataset is uploaded from a temporary folder.
        vocab_size: tokens of the tokenizer.
        shards: training shards, at most; validation has its own.
        val_fraction: share of the records for validation.
        overwrite: replace a dataset that was prepared before with other settings.
        progress: show a progress bar where stderr is a terminal.

    Raises:
        ValueError: for bad settings, if ``out`` holds something else, or if this Python comes without its sources.
    """
    if is_remote(out):
        from lightning_pack.prepare.remote import prepare_remotely

        return prepare_remotely(
            location(out),
            prepare=lambda folder: prepare_stdlib(
                folder, vocab_size=vocab_size, shards=shards, val_fraction=val_fraction, progress=progress
            ),
            overwrite=overwrite,
            progress=progress,
        )
    out = Path(out).resolve()
    options = {
        "python": platform.python_version(),
        "vocab_size": vocab_size,
        "shards": shards,
        "val_fraction": val_fraction,
    }
    there = check_output(out, recipe="stdlib", options=options, overwrite=overwrite)
    if there is not None:
        return there
    with DatasetWriter(out, shards=shards, val_fraction=val_fraction, overwrite=overwrite) as writer:
        root = Path(sysconfig.get_paths()["stdlib"])
        entries, skipped = documented(root, progress=progress)
        if not entries:
            raise ValueError(
                f"{root} holds no documented sources: use a Python that comes with its standard library as .py files"
            )
        records = {entry.key: entry.record() for entry in sorted(entries, key=lambda entry: entry.key)}
        tokenizer = train_tokenizer(
            (message["content"] for key, record in records.items() if not writer.is_val(key) for message in record["messages"]),
            vocab_size=vocab_size,
        )
        sampler = LengthSampler(RecordEncoder(tokenizer))
        with progress_bar("writing", total=len(records), shown=progress) as advance:
            for key, record in records.items():
                sampler.add(key, record)
                writer.add(key, record)
                advance(1)
        return writer.publish(
            recipe="stdlib", options=options, tokenizer=tokenizer, lengths=sampler.statistics(), skipped=skipped
        )


def documented(root: Path, *, progress: bool = False) -> tuple[list[Entry], dict[str, int]]:
    """Everything public and documented under ``root``, sorted by name, and the files that could not be read, by reason."""
    found: dict[str, Entry] = {}
    skipped: Counter[str] = Counter()
    paths = [path for path in sorted(root.rglob("*.py")) if _is_public(path.relative_to(root).with_suffix("").parts)]
    with progress_bar("reading the standard library", total=len(paths), shown=progress) as advance:
        for path in paths:
            parts = path.relative_to(root).with_suffix("").parts
            try:
                tree = _parse(path)
            except (SyntaxError, UnicodeDecodeError):
                skipped["source file that cannot be parsed"] += 1
            else:
                module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                for entry in _entries(tree.body, module, in_class=False):
                    found.setdefault(entry.name, entry)
            advance(1)
    topics = root / "pydoc_data" / "topics.py"
    if topics.is_file():
        for entry in _topics(_parse(topics)):
            found.setdefault(entry.name, entry)
    return [found[name] for name in sorted(found)], dict(skipped)


def _is_public(parts: Sequence[str]) -> bool:
    return all(
        part.isidentifier() and part not in _SKIPPED and (part == "__init__" or not part.startswith("_")) for part in parts
    ) and parts != ("__init__",)


def _parse(path: Path) -> ast.Module:
    with tokenize.open(path) as file, warnings.catch_warnings():
        # Old sources have invalid escapes, of which the compiler would tell.
        warnings.simplefilter("ignore")
        return ast.parse(file.read())


def _entries(body: Sequence[ast.stmt], prefix: str, *, in_class: bool) -> Iterator[Entry]:
    for node in body:
        if isinstance(node, (ast.If, ast.Try)):
            # Definitions that depend on the platform, or on what can be imported.
            handlers = [statement for handler in getattr(node, "handlers", []) for statement in handler.body]
            yield from _entries([*node.body, *handlers, *node.orelse], prefix, in_class=in_class)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        text = inspect.cleandoc(ast.get_docstring(node) or "")
        if isinstance(node, ast.ClassDef):
            kind, signature = "class", f"class {node.name}({', '.join(map(ast.unparse, node.bases))})".removesuffix("()")
            yield from _entries(node.body, name, in_class=True)
        else:
            kind, signature = "method" if in_class else "function", f"{node.name}({ast.unparse(node.args)})"
        if len(text) > SHORTEST:
            yield Entry(name=name, kind=kind, answer=f"{signature}\n\n{text}")


def _topics(tree: ast.Module) -> Iterator[Entry]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, text in ast.literal_eval(node.value).items():
                yield Entry(name=f"topics.{name}", kind="topic", answer=text.strip())
