"""What a folder of packed rows says about itself: what its rows were made from, how, and how full they are."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning_pack.flat_settings import flat
from lightning_pack.location import is_remote, location
from lightning_pack.offline.split_statistics import SplitStatistics
from lightning_pack.policy import PackingPolicy

#: File that only a complete folder of rows holds, what it says of its kind, and the version of its content.
#: Rows with media have a version of their own, which those that know of tokens alone refuse.
MANIFEST, KIND, FORMAT, MEDIA_FORMAT = "manifest.json", "lightning-pack packed rows", 1, 2
#: Fields of the policy that decide rows when all lengths are known; the others are about a buffer, or about an order.
DECIDE_ROWS = (
    *("capacity", "algorithm", "multiple", "width", "overlength", "max_sources", "fixed_boundaries"),
    *("min_bins", "bins_multiple_of", "delta", "seed"),
)
#: And, where sources have media, these.
DECIDE_MEDIA_ROWS = ("max_media_tokens", "max_media_bytes")
_EXAMPLES = 3
#: A folder is never replaced for what cannot be read as a manifest.
_RESTORE = "restore it, or remove the folder yourself and write the rows again"


class ManifestError(ValueError):
    """A manifest that cannot be read, or a setting that is not the one its rows were made with."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A complete folder of packed rows.

    Args:
        origin: ``"prepack"``, or the format that the rows were converted from.
        packing: the settings of the policy that decided the rows, see :data:`DECIDE_ROWS`; of converted rows those that hold.
        encoder: fingerprint of what made the tokens, tokenizer and chat template included; empty where that is not known.
        data: fingerprint of what was read, by split.
        versions: what of the libraries decided the order of reading, when the rows were written.
        pad_id: fills gaps.
        splits: statistics and shards.
        media: whether rows hold images or the like.
    """

    origin: str
    packing: Mapping[str, Any]
    encoder: Mapping[str, Any]
    data: Mapping[str, Any]
    versions: Mapping[str, Any]
    pad_id: int
    splits: Mapping[str, SplitStatistics]
    media: bool = False

    def settings(self) -> dict[str, Any]:
        """What decides the content, flat: the same settings give the same rows."""
        return flat({"origin": self.origin, "packing": self.packing, "encoder": self.encoder, "data": self.data})

    @property
    def digest(self) -> str:
        """Changes with any of the rows."""
        said = [self.settings(), self.pad_id, {name: asdict(split) for name, split in self.splits.items()}]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]

    def write(self, folder: Path) -> None:
        """Write the file, in one step."""
        state: dict[str, Any] = {"kind": KIND, "format": MEDIA_FORMAT if self.media else FORMAT} | asdict(self)
        for name, split in self.splits.items():
            derived = {"fill": round(split.fill, 6), "tail": split.tail, "gap_to_lower_bound": round(split.gap, 6)}
            state["splits"][name] = derived | state["splits"][name]
        write_json(folder / MANIFEST, state)

    @classmethod
    def read(cls, folder: str | Path) -> Manifest | None:
        """The manifest of a folder, on a disk or in an object store; None where there are no packed rows of this package.

        Raises:
            ManifestError: if it is damaged, or of a later format.
        """
        text = _text(folder)
        if text is None:
            return None
        name = f"{location(folder).rstrip('/')}/{MANIFEST}"
        try:
            state = json.loads(text)
        except ValueError as e:
            raise ManifestError(f"{name} is damaged ({e}): {_RESTORE}") from e
        if not isinstance(state, dict) or state.get("kind") != KIND:
            return None
        if state.get("format") not in (FORMAT, MEDIA_FORMAT):
            raise ManifestError(
                f"{name} has format {state.get('format')!r}, this version reads {FORMAT} and {MEDIA_FORMAT}: {_RESTORE}"
            )
        try:
            values: dict[str, Any] = {f.name: state[f.name] for f in fields(cls) if f.default is MISSING}
            # Rows that were written before there were images say nothing of them.
            values["media"] = state.get("media", False)
            values["splits"] = {split: SplitStatistics.of(each) for split, each in state["splits"].items()}
            found = cls(**values)
            found.policy()
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise ManifestError(f"{name} is damaged ({type(e).__name__}: {e}): {_RESTORE}") from e
        return found

    def policy(self) -> PackingPolicy:
        """The packing rules that the rows were made with; rows that others decided have an algorithm of no meaning."""
        return global_policy(**{"algorithm": "minimum_bin_slack"} | dict(self.packing))

    def summary(self) -> str:
        """A few lines for people."""
        return "\n".join(f"{split}: {found.summary()}" for split, found in self.splits.items())


def global_policy(**settings: Any) -> PackingPolicy:
    """A policy for lengths that are all known: ``settings`` are those of :data:`DECIDE_ROWS`.

    Raises:
        ValueError: for settings that do not fit together, see :class:`~lightning_pack.PackingPolicy`.
    """
    several = settings.get("bins_multiple_of", 1)
    least = max(settings.get("min_bins") or 1, 256)
    # There is no buffer; the checks of a policy ask for one that is large enough.
    buffer_size = -(-least // several) * several if type(several) is int and several > 0 else 256
    return PackingPolicy(carry_over=False, buffer_size=buffer_size, **settings)


def different(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line for each flat setting that differs."""
    lines = []
    for name in dict.fromkeys([*old, *new]):
        there, asked = old.get(name, "absent"), new.get(name, "absent")
        if there == asked:
            continue
        if isinstance(there, list) and isinstance(asked, list):
            # Files of the data: there may be hundreds, of which one differs.
            there, asked = _only(there, asked), _only(asked, there)
        lines.append(f"  {name}: {there!r} there, {asked!r} asked for")
    return lines


def _only(values: list[Any], others: list[Any]) -> list[Any]:
    found = [value for value in values if value not in others] or values
    return found if len(found) <= _EXAMPLES else [*found[:_EXAMPLES], f"and {len(found) - _EXAMPLES} more"]


def write_json(path: Path, state: Any) -> None:
    """Write a JSON file, in one step."""
    unfinished = path.with_name(f".{path.name}.partial")
    with unfinished.open("w") as file:
        file.write(json.dumps(state, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _text(folder: str | Path) -> str | None:
    if not is_remote(folder):
        path = Path(folder) / MANIFEST
        return path.read_text() if path.is_file() else None
    from megatron.energon.epathlib import EPath

    import lightning_pack.energon.storage  # noqa: F401 - Energon reads object stores through it

    file = EPath(location(folder)) / MANIFEST
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        return bytes(opened.read()).decode()
