"""A file of one's own: one JSON object a line, each a chat or a plain text.

The forms are those of :mod:`lightning_pack.encoders.messages`. Other fields of a line are kept if they are strings, numbers or
truth values, so that ``group_by`` may name them; lists, objects and null are not. The file is read once, line by line, so its
size does not matter.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

from lightning_pack.encoders import RecordEncoder, VisionChatEncoder, load_tokenizer, tokenizer_fingerprint
from lightning_pack.encoders.image_processor import image_processor_fingerprint
from lightning_pack.location import is_remote, location
from lightning_pack.prepare.dataset import DatasetWriter
from lightning_pack.prepare.image_lines import ImageLineParser
from lightning_pack.prepare.lines import LineReader, parse_line, refuse_other_kind
from lightning_pack.prepare.progress import progress_bar
from lightning_pack.prepare.result import LengthSampler, PreparedDataset, check_ours, check_output, prepared


class BadLineError(ValueError):
    """Lines of the file are not what they should be."""


def prepare_jsonl(
    file: str | Path,
    out: str | Path,
    *,
    tokenizer: str | Path,
    val_fraction: float = 0.05,
    shards: int = 8,
    on_bad_line: Literal["error", "skip"] = "error",
    vision: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> PreparedDataset:
    """Prepare a file of chats and texts in folder ``out``.

    Sample keys are line numbers. Blank lines are ignored.

    Args:
        file: the file, UTF-8.
        out: destination; absent, empty, or a dataset prepared before. ``msc://PROFILE/...`` is a folder in an object
            store, to which the dataset is uploaded from a temporary folder.
        tokenizer: folder of the tokenizer, on a disk or in an object store; it is copied into the dataset, and lengths are
            measured with it.
        val_fraction: share of the records for validation; with 0 there is no validation split.
        shards: training shards, at most; validation has its own.
        on_bad_line: ``"error"`` reads the whole file and then tells of the bad lines, ``"skip"`` leaves them out and counts.
        vision: family of a vision-language model, such as ``"qwen3_vl"``: chats may have images (their files, relative to this
            one, go into the dataset), and the folder of the tokenizer holds an image processor too. An image whose file changed
            since is not noticed: prepare again with ``overwrite``.
        overwrite: replace a dataset that was prepared before with other settings.
        progress: show a progress bar where stderr is a terminal.

    Raises:
        BadLineError: under ``on_bad_line="error"``, with the first bad lines, their numbers and what is wrong with them.
        ValueError: for bad settings, a file without records, or if ``out`` holds something else.
    """
    if is_remote(out):
        from lightning_pack.prepare.remote import prepare_remotely

        return prepare_remotely(
            location(out),
            prepare=lambda folder: prepare_jsonl(
                file,
                folder,
                tokenizer=tokenizer,
                val_fraction=val_fraction,
                shards=shards,
                on_bad_line=on_bad_line,
                vision=vision,
                progress=progress,
            ),
            overwrite=overwrite,
            progress=progress,
        )
    file, out = Path(file), Path(out).resolve()
    if on_bad_line not in ("error", "skip"):
        raise ValueError(f"on_bad_line={on_bad_line!r} is not 'error' or 'skip'")
    if not file.is_file():
        raise ValueError(f"{file} is no file: give a file with one JSON object a line")
    refuse_other_kind(file)
    check_ours(out)
    if is_remote(tokenizer):
        from lightning_pack.energon.storage import local_folder

        tokenizer = local_folder(tokenizer)
    encoder = RecordEncoder(load_tokenizer(tokenizer)) if vision is None else VisionChatEncoder(tokenizer, family=vision)
    loaded = encoder.tokenizer
    image_processor = encoder.image_processor if isinstance(encoder, VisionChatEncoder) else None
    images = {} if image_processor is None else {"vision": vision, **image_processor_fingerprint(image_processor)}

    def options(content: str) -> dict[str, Any]:
        return {
            "content": content,
            # Datasets of releases that kept no other fields are another thing.
            "other_fields": "plain",
            "tokenizer": tokenizer_fingerprint(loaded),
            "val_fraction": val_fraction,
            "shards": shards,
            "on_bad_line": on_bad_line,
            **images,
        }

    if not overwrite and prepared(out) is not None:
        there = check_output(out, recipe="jsonl", options=options(_content(file)), overwrite=False)
        if there is not None:
            return there
    with DatasetWriter(out, shards=shards, val_fraction=val_fraction, overwrite=overwrite) as writer:
        sampler = LengthSampler(encoder)
        with file.open("rb") as stream:
            lines = LineReader(parse_line if vision is None else ImageLineParser(file.resolve().parent))
            with progress_bar(f"reading {file.name}", total=file.stat().st_size, shown=progress) as advance:
                for line in stream:
                    record = lines.read(line)
                    advance(len(line))
                    if record is None or (lines.bad and on_bad_line == "error"):
                        continue
                    key = f"{lines.number:010d}"
                    sampler.add(key, record)
                    writer.add(key, record, files=getattr(record, "files", {}))
        if lines.bad and on_bad_line == "error":
            raise BadLineError(lines.report(file))
        if not lines.good:
            raise ValueError(
                f"{file} holds no records: {lines.number} lines, {lines.bad.total()} of them bad\n{lines.hint()}"
                'Needed are lines such as {"text": "A plain document."}, {"prompt": "2 + 2 =", "completion": "4"} or '
                '{"messages": [...]}'
            )
        return writer.publish(
            recipe="jsonl",
            options=options(lines.content.hexdigest()),
            tokenizer=loaded,
            image_processor=image_processor,
            lengths=sampler.statistics(),
            skipped=dict(lines.bad.most_common()),
        )


def _content(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
