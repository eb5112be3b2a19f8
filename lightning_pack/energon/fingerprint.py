"""Data recognised by its content, wherever it lies.

Of every file the size, the number of samples and hashes are kept, of growing parts of it:

* ``ends``: 64 KiB at both ends; all that is read of files in an object store;
* ``spread``: 16 blocks of 4 KiB, evenly spread (local files);
* ``index``: the ``.idx`` file beside it (local files; 16 MiB of it at most);
* ``whole``: all of it, where the local files of a dataset have no more than 256 MiB together (about a second).

Two fingerprints are compared by the parts that both have. So in a larger dataset, a change of equal size between the blocks is
not seen unless it moves a sample, and in an object store one between the ends. Auxiliary media of a metadataset are not read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.energon.epathlib import EPath

from lightning_pack.energon.dataset import _leaves
from lightning_pack.energon.storage import read_range

#: Changes with every release of this package after which the same settings give other batches.
STREAM_VERSION = 3
#: Local files of so many bytes together are read in full.
READ_IN_FULL = 256 << 20
#: More files than this are listed in groups of neighbours.
MOST_LISTED = 200
_END, _BLOCK, _BLOCKS, _INDEX = 1 << 16, 1 << 12, 16, 1 << 24
_known: dict[tuple[Any, ...], dict[str, str]] = {}


def data_fingerprint(path: str, *, split: str = "train", missing_ok: bool = False) -> dict[str, Any]:
    """What decides which samples a dataset has, and in which order they lie, as plain values.

    Args:
        path: dataset folder, ``.jsonl`` file or metadataset ``.yaml``.
        split: the part that is read.
        missing_ok: whether a file that cannot be opened is listed as missing.

    Returns:
        ``split``; ``blend``, a line for each dataset: its type, weight and what is left out of it; and ``files``, a line for
        each shard in the order of reading, or for a group of shards.

    Raises:
        ValueError: if the dataset cannot be opened, or one of its files is missing and must not be.
    """
    leaves, mode = _leaves(path, split)
    blend, files = [], list[tuple[str, EPath, int | None]]()
    for number, leaf in enumerate(leaves, 1):
        config = json.dumps([mode, _settled(leaf.dataset.config())], sort_keys=True, default=str)
        shares = {"weight": leaf.weight, "repetitions": leaf.repetitions}
        words = [type(leaf.dataset).__name__, *(f"{name} {share:g}" for name, share in shares.items() if share is not None)]
        blend.append(f"{', '.join(words)}, settings {_hex(config.encode())}")
        prefix = f"dataset {number}/" if len(leaves) > 1 else ""
        files += [(prefix + name, file, samples) for name, file, samples in _files(leaf.dataset)]
    sizes = [_size(file, name, path, missing_ok=missing_ok) for name, file, _ in files]
    local = [file.is_local() for _, file, _ in files]
    whole = sum(size or 0 for size, here in zip(sizes, local, strict=True) if here) <= READ_IN_FULL
    lines = [
        (name, {"samples": samples} | ({"missing": 1} if size is None else {"bytes": size} | _parts(file, size, whole=whole)))
        for (name, file, samples), size in zip(files, sizes, strict=True)
    ]
    return {"split": split, "blend": _shortened(blend), "files": [_line(*each) for each in _grouped(lines)]}


def library_fingerprint() -> dict[str, Any]:
    """What of the libraries decides the order of the data.

    Energon's every release may deal out or shuffle samples in another way, so its version is compared. Of numpy and torch only
    the random numbers matter; they are compared by what they are, so that an upgrade that keeps them is no change.
    """
    numpy_order = np.random.default_rng([1, 2, 3]).permutation(16).tolist()
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randperm(12, generator=generator), torch.randint(0, 1 << 20, (3,), generator=generator))
    uniform = (torch.rand(2, generator=generator).double() * (1 << 24)).long()
    return {
        "lightning-pack's stream": STREAM_VERSION,
        "megatron-energon": version("megatron-energon"),
        "numpy's random order": " ".join(map(str, numpy_order)),
        "torch's random order": " ".join(str(n) for part in (*drawn, uniform) for n in part.tolist()),
    }


def same_index(saved: Iterable[str], now: Iterable[str]) -> bool:
    """Whether two lists of files promise the same samples in the same order, whatever the files hold."""
    before, after = ([(name, facts.get("samples")) for name, facts in map(_read, lines)] for lines in (saved, now))
    return before == after


def changed_files(saved: Iterable[str], now: Iterable[str]) -> list[str]:
    """What differs between two lists of files: a line for each file that changed, is missing or is new."""
    before, after = (dict(_read(line) for line in lines) for lines in (saved, now))
    lines = []
    for name in before:
        if name not in after:
            lines.append(f"{name} is missing now")
        elif before[name].get("missing", "0") != after[name].get("missing", "0"):
            lines.append(f"{name} {'cannot be opened now' if 'missing' in after[name] else 'is back'}")
        elif differ := _differ(before[name], after[name]):
            then, later = (" and ".join(_said(part, facts[name][part]) for part in differ) for facts in (before, after))
            lines.append(f"{name} has {then} in the checkpoint, {later} now")
    lines += [f"{name} is new" for name in after if name not in before]
    if not lines and list(before) != list(after):
        first = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        lines = [f"file {first + 1} is {list(before)[first]} in the checkpoint, {list(after)[first]} now"]
    return lines


def _differ(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    differ = [part for part in before if part in after and before[part] != after[part]]
    # The hash of most of the content says what the others say.
    content = [part for part in ("whole", "spread", "ends") if part in differ]
    return [part for part in differ if part not in content[1:]]


def _files(dataset: Any) -> list[tuple[str, EPath, int | None]]:
    """Names below the dataset's folder, places, and numbers of samples."""
    if hasattr(dataset, "shards"):
        return [(shard.name, shard.path, shard.count) for shard in dataset.shards]
    if hasattr(dataset, "inner_datasets"):
        inner = [
            (f"part {number}/{name}", file, samples)
            for number, part in enumerate(dataset.inner_datasets, 1)
            for name, file, samples in _files(part)
        ]
        return [*inner, ("join index", dataset.join_index, None)]
    return [(path.name, path, len(dataset)) for path in dataset.paths if not path.is_local() or Path(str(path)).is_file()]


def _size(file: EPath, name: str, path: str, *, missing_ok: bool) -> int | None:
    try:
        return int(file.size())
    except OSError as e:
        if missing_ok:
            return None
        raise ValueError(
            f"the file {name!r} of the dataset {path!r} cannot be read ({type(e).__name__}: {e}): bring it back, or prepare "
            "the dataset again without it; on_damaged='skip' goes on without its samples"
        ) from e


def _parts(file: EPath, size: int, *, whole: bool) -> dict[str, str]:
    if not file.is_local():
        head = min(size, _END)
        tail = min(size - head, _END)
        ends = read_range(file, offset=0, size=head), read_range(file, offset=size - tail, size=tail)
        return {"ends": _hex(*ends)}
    local = Path(str(file.local_path()))
    index = local.with_name(local.name + ".idx")
    key = (str(local), whole, *((p.stat().st_size, p.stat().st_mtime_ns) for p in (local, index) if p.exists()))
    if key not in _known:
        with local.open("rb") as stream:
            parts = {"ends": _hex(*_ends(stream, size))}
            parts["spread"] = _hex(*_spread(stream, size))
            if whole:
                stream.seek(0)
                parts["whole"] = _hex(*iter(partial(stream.read, 1 << 20), b""))
        if index.exists():
            with index.open("rb") as stream:
                parts["index"] = _hex(stream.read(_INDEX))
        _known[key] = parts
    return _known[key]


def _ends(stream: Any, size: int) -> Iterable[bytes]:
    yield stream.read(_END)
    if size > _END:
        stream.seek(max(size - _END, _END))
        yield stream.read(_END)


def _spread(stream: Any, size: int) -> Iterable[bytes]:
    for block in range(_BLOCKS):
        stream.seek(max(size - _BLOCK, 0) * (2 * block + 1) // (2 * _BLOCKS))
        yield stream.read(_BLOCK)


def _hex(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:8]


def _grouped(lines: list[tuple[str, dict[str, Any]]]) -> Iterable[tuple[str, dict[str, Any]]]:
    if len(lines) <= MOST_LISTED:
        yield from lines
        return
    length = -(-len(lines) // MOST_LISTED)
    for start in range(0, len(lines), length):
        group = lines[start : start + length]
        facts = {name: sum(fact.get(name) or 0 for _, fact in group) for name in ("samples", "bytes", "missing")}
        for part in ("ends", "spread", "whole", "index"):
            if all(part in fact for _, fact in group):
                facts[part] = _hex("\n".join(f"{name} {fact['bytes']} {fact[part]}" for name, fact in group).encode())
        yield (
            f"{group[0][0]} to {group[-1][0]} ({len(group)} files)",
            {name: value for name, value in facts.items() if value or name != "missing"},
        )


def _line(name: str, facts: Mapping[str, Any]) -> str:
    return f"{name}: {', '.join(f'{part} {value}' for part, value in facts.items() if value is not None)}"


def _read(line: str) -> tuple[str, dict[str, str]]:
    name, _, facts = line.rpartition(": ")
    return name, dict(fact.rpartition(" ")[::2] for fact in facts.split(", "))


def _said(part: str, value: str) -> str:
    return f"{value} {part}" if part in ("samples", "bytes") else f"{'index' if part == 'index' else 'content'} {value}"


def _shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= MOST_LISTED else [f"{len(lines)} datasets, {_hex(*(line.encode() for line in lines))}"]


#: In Energon's account of a dataset: what the list of files says too.
_ELSEWHERE = ("shards", "count", "jsonl_filename")


def _settled(config: Any) -> Any:
    # Energon marks settings that may change, such as folders, by a leading underscore.
    if isinstance(config, dict):
        kept = {name: value for name, value in config.items() if not str(name).startswith("_") and name not in _ELSEWHERE}
        # A list made of a set, so in another order in each process.
        return {name: sorted(value) if name == "sample_excludes" else _settled(value) for name, value in kept.items()}
    if isinstance(config, list | tuple):
        return [_settled(value) for value in config]
    return config
