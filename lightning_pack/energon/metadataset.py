"""What is wrong with a file that was given as a metadataset, in words; Energon's errors are about its own classes."""

from __future__ import annotations

from typing import Any

import yaml
from megatron.energon.epathlib import EPath
from megatron.energon.typed_converter import JsonValueError

from lightning_pack.energon.outage import StorageError

#: What a metadataset looks like; paths are relative to the file.
EXAMPLE = """\
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {path: chats, weight: 3}
      - {path: texts, weight: 1}
  val:
    path: chats"""
#: Sections of a run's configuration.
_OF_A_RUN = ("model", "data", "trainer")
_MOST_SHOWN = 300


def is_metadataset(path: str) -> bool:
    """Whether a path is one that can only be a metadataset, by its name."""
    return path.endswith((".yaml", ".yml"))


def metadataset_problem(path: str, error: Exception, *, split: str) -> str | None:
    """What a file lacks that Energon could not open as a metadataset.

    Args:
        path: of the file, on a disk or in an object store.
        error: that opening it raised.
        split: that was asked for.

    Returns:
        The rest of a sentence about the file; None where the error is not about what is written in it.
    """
    if not is_metadataset(path) or isinstance(error, StorageError):
        return None
    if path.endswith(".yml"):
        return "ends with .yml, and Energon knows a metadataset by the ending .yaml: rename it"
    try:
        with EPath(path).open("rb") as file:
            content = bytes(file.read())
    except Exception:
        # What keeps it from being read is the error that there was.
        return None
    if not content.strip():
        return "is empty"
    try:
        # Energon's parser tells on stderr, in terms of its own code.
        said = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        mark = getattr(e, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}: "
        return f"is no YAML that can be read ({place}{getattr(e, 'problem', None) or _shown(e)})"
    if not isinstance(said, dict):
        return f"holds a {'list' if isinstance(said, list) else 'text'} and no splits"
    return _problem_of_splits(said, split) or _problem_of_parts(said, error)


def _problem_of_splits(said: dict[str, Any], split: str) -> str | None:
    if "splits" not in said:
        run = [name for name in _OF_A_RUN if name in said]
        hint = " (the configuration of a run is given as --config, and names the data)" if run else ""
        return f"has no 'splits', but {_names(said)}{hint}"
    splits = said["splits"]
    if not isinstance(splits, dict) or not splits:
        return "has no split in its 'splits'"
    if split not in splits:
        return f"has no split {split!r}, but {_names(splits)}"
    return None


def _problem_of_parts(said: dict[str, Any], error: Exception) -> str | None:
    if isinstance(error, RecursionError):
        return "leads to itself: a metadataset that it names names it again"
    if isinstance(error, FileNotFoundError):
        return f"names a dataset that is not there or was not prepared ({error})"
    wrong = isinstance(error, JsonValueError | TypeError | AttributeError | ModuleNotFoundError)
    if not wrong and not str(error).startswith("Missing required argument"):
        return None
    kind = "" if "__class__" in said else ", and does not say __class__: MetadatasetV2"
    return f"has parts that no metadataset has, or lacks some ({_shown(error)}){kind}"


def _names(said: dict[str, Any]) -> str:
    listed = ", ".join(map(str, list(said)[:8])) or "nothing"
    return f"{listed}, ..." if len(said) > 8 else listed


def _shown(error: Exception) -> str:
    return " ".join(str(error).split())[:_MOST_SHOWN]
