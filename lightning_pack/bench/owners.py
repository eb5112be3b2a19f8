"""``lightning-pack bench owners``: real tokens per second of training, by who packs, next to padded batches.

One model, one module and the same sources everywhere, under the Trainer, loading included: packed while Energon data is read
(tokenization included), packed ahead and replayed, packed in the trainer over several padded batches and in each of them;
padded batches of shuffled sources, and of sources grouped by length, through transformers' own attention. The sources are the
first of the data, as long as they come there. A step has about as many real tokens on average everywhere: a padded batch holds
as many sources as a row. Every run must train on every token once.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from lightning_pack.bench.configuration import configured, generated
from lightning_pack.bench.owner_runs import Meter, OwnerRun, OwnerRuns, turns_of
from lightning_pack.bench.result import BenchResult
from lightning_pack.datamodule import EnergonPackDataModule
from lightning_pack.module import PackedCausalLM


@dataclass(frozen=True, kw_only=True)
class OwnerSpeed:
    """What one way to make batches gives.

    Args:
        way: short, one of :data:`~lightning_pack.bench.owner_runs.WAYS`.
        name: in words.
        rate: real tokens per second, the median of the turns.
        rates: of each turn.
        fill: real tokens per token that the model computes, pads included.
        real_tokens_per_step: on average.
        largest_step: tokens of the largest batch, pads included.
    """

    way: str
    name: str
    rate: float
    rates: tuple[float, ...]
    fill: float
    real_tokens_per_step: float
    largest_step: int

    @classmethod
    def of(cls, run: OwnerRun, meters: Sequence[Meter]) -> OwnerSpeed:
        """From its turns."""
        rates = tuple(meter.rate for meter in meters)
        real, slots = sum(sum(meter.real) for meter in meters), sum(sum(meter.slots) for meter in meters)
        return cls(
            way=run.way,
            name=run.name,
            rate=median(rates),
            rates=rates,
            fill=real / slots,
            real_tokens_per_step=real / sum(len(meter.real) for meter in meters),
            largest_step=max(max(meter.slots) for meter in meters),
        )

    def line(self, padded: OwnerSpeed) -> str:
        """For people, with the ratio to padded batches."""
        spread = f"{min(self.rates):,.0f} to {max(self.rates):,.0f}"
        return (
            f"  {self.name:26} {self.rate:8,.0f} real tokens/s  {self.rate / padded.rate:5.2f}x   fill {self.fill:6.1%}   "
            f"{self.real_tokens_per_step:,.0f} real tokens a step, largest step {self.largest_step:,}; turns {spread}"
        )


def compared(runs: OwnerRuns, *, turns: int, seconds: float = float("inf")) -> list[OwnerSpeed]:
    """Every way, padded batches last; see :func:`~lightning_pack.bench.owner_runs.turns_of`."""
    meters = turns_of(runs, turns=turns, seconds=seconds)
    return [OwnerSpeed.of(run, meters[run.way]) for run in runs]


def results_of(speeds: Sequence[OwnerSpeed]) -> Iterator[BenchResult]:
    """Rows of the table: every way against padded batches, which come last."""
    padded = speeds[-1]
    for speed in speeds[:-1]:
        yield BenchResult(
            name=f"owners/{speed.way}",
            what=f"training under the Trainer, loading included: {speed.name}, against padded batches",
            value=speed.rate / padded.rate,
            unit="x",
            better="more",
            details=f"fill {speed.fill:.0%} against {padded.fill:.0%}; largest step {speed.largest_step:,} against "
            f"{padded.largest_step:,} tokens; {speed.rate:,.0f} against {padded.rate:,.0f} real tokens/s",
        )


@contextmanager
def threads_of_torch(number: int) -> Iterator[None]:
    """Within, torch uses so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def runs_of(module: PackedCausalLM, data: EnergonPackDataModule, *, rows: int, folder: Path) -> OwnerRuns:
    """The runs of one model and prepared data; see :class:`~lightning_pack.bench.owner_runs.OwnerRuns`."""
    module.configure_model()
    assert module.model is not None
    return OwnerRuns(module.model, data, rows=rows, folder=folder)


def main(args: Sequence[str]) -> None:
    """``lightning-pack bench owners`` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="lightning-pack bench owners",
        description="Real tokens per second of training: packed while reading, ahead or in the trainer, and in padded batches.",
    )
    parser.add_argument("-c", "--config", type=Path, help="a configuration of fit (default: a tiny model, generated texts)")
    parser.add_argument("--rows", type=int, default=12, help="rows that the sources fill (default: 12)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each way, whose median counts (default: 3)")
    parser.add_argument(
        "--seconds", type=int, default=150, help="begin no further turn that would end after so many (default: 150)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch (default: 1, so that what else the machine does weighs on all alike)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures there as JSON")
    options = parser.parse_args(args)
    for name, least in (("rows", 2), ("turns", 1), ("seconds", 1), ("threads", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: at least {least} is needed")
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: there is no folder {options.out.parent}")
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print("This takes some minutes; the machine should have nothing else to do.", file=sys.stderr)
    with threads_of_torch(options.threads):
        speeds = _printed(options)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(speed) for speed in speeds], indent=2) + "\n")
        print(f"written: {options.out}")


def _printed(options: argparse.Namespace) -> list[OwnerSpeed]:
    with tempfile.TemporaryDirectory(prefix="lightning-pack-bench-") as name:
        folder = Path(name)
        if options.config is None:
            # Some 30 sources to a row, and twice as many as are trained on.
            module, data = generated(folder / "generated", sources=max(1_000, 60 * options.rows))
        else:
            module, data = configured(options.config)
        data.prepare_data()
        runs = runs_of(module, data, rows=options.rows, folder=folder / "written")
        print(
            f"{options.config or 'generated texts'}: {options.rows} rows of {data.packing.capacity:,} tokens, "
            f"{len(runs.sources):,} sources, padded batches of {runs.batch_size}; loader workers: {runs.workers}, "
            f"{torch.get_num_threads()} threads, torch {torch.__version__}",
            flush=True,
        )
        speeds = compared(runs, turns=options.turns, seconds=options.seconds)
        print(f"median of {len(speeds[-1].rates)} turns")
        for speed in speeds:
            print(speed.line(speeds[-1]), flush=True)
        print(*results_of(speeds), sep="\n", flush=True)
    return speeds
