"""The checkpoints of a run's folder, and the one that a report is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_pack.checkpoints.contents import Contents
from lightning_pack.checkpoints.file import UnreadableCheckpointError, checkpoints_in, is_sharded, read_checkpoint

#: Folders inside each other: Lightning's ``lightning_logs/version_0/checkpoints``, and a few around it.
_DEEPEST = 5


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The last checkpoint of a folder.

    Args:
        path: of it.
        how: that it was chosen, in a sentence.
    """

    path: Path
    how: str


def found_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first; where it holds none itself, those of the folders in it.

    Raises:
        UnreadableCheckpointError: if there is none.
    """
    found = list(_below(folder, _DEEPEST))
    if not found:
        raise UnreadableCheckpointError(
            f"{folder} holds no checkpoint (files .ckpt, .pt or .pth, or sharded checkpoints), nor do the folders in it: name "
            "the folder that the Trainer saved to, or a checkpoint. Of a dataset, '--show 3' draws the first rows"
        )
    return sorted(found, key=lambda each: (each.stat().st_mtime_ns, str(each)), reverse=True)


def last_of(folder: Path) -> Chosen:
    """The readable checkpoint with the most steps; of several, the newest.

    Raises:
        UnreadableCheckpointError: if none can be read.
    """
    found = found_in(folder)
    steps = {path: step for path in found if (step := _step(path)) is not None}
    if not steps:
        raise UnreadableCheckpointError(
            f"none of the {len(found)} checkpoints in {folder} can be read: the newest is {found[0]}, and 'lightning-pack "
            f"inspect {found[0]}' says what is wrong with it"
        )
    best = max(steps.values())
    path = next(each for each in found if steps.get(each) == best)
    if len(found) == 1:
        return Chosen(path=path, how=f"The only checkpoint in {folder} was taken.")
    same = sum(step == best for step in steps.values())
    newest = f", the newest of {same} that have as many," if same > 1 else ""
    unread = len(found) - len(steps)
    broken = f" ({unread} of which cannot be read)" if unread else ""
    return Chosen(
        path=path,
        how=f"{path.relative_to(folder)}{newest} was taken: it has the most steps, {best:,}, of the {len(found)} checkpoints "
        f"in {folder}{broken}.",
    )


def _below(folder: Path, levels: int) -> Iterator[Path]:
    own = checkpoints_in(folder)
    yield from own
    if own or not levels:
        return
    for each in sorted(folder.iterdir()):
        if each.is_dir() and not each.is_symlink() and not each.name.startswith(".") and not is_sharded(each):
            yield from _below(each, levels - 1)


def _step(path: Path) -> int | None:
    """Optimizer steps, 0 where that is not said; None for one that cannot be read."""
    try:
        return Contents.of(read_checkpoint(path, others=False), path).step or 0
    except (UnreadableCheckpointError, OSError):
        return None
