"""Whether a run would go on from a checkpoint, told before it starts; by the same checks that ``fit`` makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_pack.checkpoints.contents import Contents, state_name
from lightning_pack.datamodule import EnergonPackDataModule
from lightning_pack.resume import ResumeError, no_position


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What ``fit`` would do with a checkpoint.

    Args:
        resumes: whether the batches would go on, exactly where there is no ``damage``.
        problem: why not, in the words of ``fit``; None if it would.
        damage: how the data differs from what it was, where that is no reason to refuse (``on_damaged="skip"``).
        restarts: whether ``fit`` would go on regardless, with the data from its beginning (``on_mismatch="restart"``).
        ranks: data-parallel ranks that were assumed.
        ranks_from: what says so.
    """

    resumes: bool
    problem: str | None
    damage: str | None
    restarts: bool
    ranks: int
    ranks_from: str

    def lines(self, config: str) -> Iterator[str]:
        """In words."""
        yield f"Against {config}, on {self.ranks} data-parallel {'rank' if self.ranks == 1 else 'ranks'} ({self.ranks_from}):"
        if self.resumes:
            if self.damage is None:
                yield "WOULD RESUME: the next batches are those of the run that never stopped"
            else:
                yield "WOULD RESUME, but not exactly"
                yield self.damage
            yield "(in the data; settings of model and Trainer, which fit compares too, are not looked at here)"
            return
        yield "WOULD START THE DATA OVER (on_mismatch='restart')" if self.restarts else "WOULD NOT RESUME"
        yield str(self.problem)


def verdict_of(
    checkpoint: Mapping[Any, Any], path: Path, datamodule: EnergonPackDataModule, *, ranks: int, ranks_from: str = "ranks"
) -> Verdict:
    """Compare a checkpoint with a datamodule that has no Trainer. The data is opened, and no sample is read.

    Args:
        checkpoint: what the file holds.
        path: the file.
        datamodule: as the run would make it.
        ranks: data-parallel ranks of the run.
        ranks_from: where that number comes from.
    """
    problem: ValueError | None = None
    damage: str | None = None
    restarts = False
    name = type(datamodule).__qualname__
    if not Contents.of(checkpoint, path).trainable:
        problem = ResumeError(f"{path} holds weights only: there is no state of an optimizer to go on with")
    elif name not in checkpoint:
        problem = ResumeError(no_position(path, type(datamodule)))
        restarts = datamodule.on_mismatch == "restart"
        if (other := state_name(checkpoint)) is not None:
            problem = ResumeError(f"{problem}\n(It holds one for {other!r:.80}.)")
    else:
        try:
            problem, damage = datamodule.compared(checkpoint[name], ranks=ranks)
            restarts = problem is not None and datamodule.on_mismatch == "restart"
        except ValueError as e:
            # Of the data, which fit cannot open either.
            problem = e
            if datamodule.prepare is not None and not Path(datamodule.path).exists():
                made = f"lightning-pack prepare {datamodule.prepare} {datamodule.path}"
                problem = ValueError(f"{e}. 'fit' would make it first; '{made}' does so now, to be compared")
    text = None if problem is None else str(problem)
    resumes = problem is None
    return Verdict(resumes=resumes, problem=text, damage=damage, restarts=restarts, ranks=ranks, ranks_from=ranks_from)


def ranks_of(trainer: Mapping[str, Any], datamodule: EnergonPackDataModule) -> tuple[int, str] | None:
    """Data-parallel ranks by a Trainer's settings, and what says so; None where only the machine could tell.

    Raises:
        ValueError: if the model-parallel size does not divide the processes.
    """
    devices, nodes = _devices(trainer), trainer.get("num_nodes", 1)
    if devices is None or type(nodes) is not int or nodes < 1:
        return None
    _, ranks = datamodule.parallel.data_parallel(0, world_size=devices * nodes)
    shards = datamodule.parallel.model_parallel_size
    over = f" / {shards} ranks of the model" if shards > 1 else ""
    return ranks, f"trainer.devices={trainer.get('devices')!r}, num_nodes={nodes}{over}"


def _devices(trainer: Mapping[str, Any]) -> int | None:
    devices = trainer.get("devices", "auto")
    if devices == "auto":
        # Lightning's number of processors to use on a CPU.
        return 1 if trainer.get("accelerator") == "cpu" else None
    if isinstance(devices, list):
        return len(devices) or None
    if isinstance(devices, str):
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        if not parts or not all(part.isdigit() for part in parts):
            return None
        devices = int(parts[0]) if "," not in devices else len(parts)
    return devices if type(devices) is int and devices > 0 else None
