"""``lightning-pack bench``: what packing gives and what it costs, as ratios within one run.

Three questions, each about a configuration of ``fit``:

* ``training``: real tokens per second, packed against padded batches of the same sources and the same token budget: of a fixed
  number of rows (what a DataLoader gives; the budget is the mean), and of as many rows as the budget holds;
* ``lightning``: a step under the Trainer against a bare loop over the same rows;
* ``loader``: sources per second of the packing loader against Energon's plain loader with the same encoder.

Both sides of a ratio are measured in turns and compared by their fastest turn, so that a busy machine hurts both alike.

``lightning-pack bench resume`` asks what the position in a checkpoint costs, see :mod:`lightning_pack.bench.resume`;
``lightning-pack bench bins`` compares the packers, see :mod:`lightning_pack.bench.bins`; ``lightning-pack bench stream``
compares them where sources are packed as they are read, see :mod:`lightning_pack.bench.stream`; ``lightning-pack bench
attention`` compares attention by boundaries with a mask over the row, see :mod:`lightning_pack.bench.attention`;
``lightning-pack bench owners`` compares the three places where packing may happen, see :mod:`lightning_pack.bench.owners`;
``lightning-pack bench --all`` runs all of these in bounded sizes, see :mod:`lightning_pack.bench.everything`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from lightning_pack.bench import attention, bins, everything, owners, resume, stream
from lightning_pack.bench.configuration import configured
from lightning_pack.bench.loading import compare_loader, rows_of
from lightning_pack.bench.training import compare_lightning, compare_training

COMPARISONS = ("training", "lightning", "loader")
_COMMANDS = {
    "attention": attention.main,
    "bins": bins.main,
    "owners": owners.main,
    "resume": resume.main,
    "stream": stream.main,
}
_DEFAULTS: dict[str, Any] = {"only": COMPARISONS, "rows": 16, "sources": 8_000, "turns": 3}
_OF_ALL = ("out", "write", "small")


def main(args: Sequence[str]) -> None:
    """``lightning-pack bench`` with these arguments."""
    if args and args[0] in _COMMANDS:
        _COMMANDS[args[0]](args[1:])
        return
    parser = _parser()
    given = vars(parser.parse_args(args))
    if given.pop("all", False):
        _refuse(parser, given, ("config", *_DEFAULTS), "does not go with --all, whose sizes and data are its own")
        everything.run_all(**given)
        return
    _refuse(parser, given, _OF_ALL, "goes with --all only")
    if "config" not in given:
        parser.error("--config FILE is needed, or --all for every benchmark")
    options = {**_DEFAULTS, **given}
    for name in ("rows", "sources", "turns"):
        if options[name] < 1:
            parser.error(f"--{name} {options[name]}: at least 1 is needed")
    _compare(**options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-pack bench",
        description="What packing gives and costs, as ratios in one run.",
        epilog="'lightning-pack bench resume' measures what the position in a checkpoint costs, 'lightning-pack bench bins' "
        "compares the packers, 'lightning-pack bench stream' compares them on streams, 'lightning-pack bench attention' "
        "measures attention by boundaries against a mask, 'lightning-pack bench owners' compares packing while reading, ahead, "
        "and in the trainer.",
        # So that an option that does not go with others is known from one that is not given.
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    one = parser.add_argument_group("your model and data")
    one.add_argument("-c", "--config", type=Path, help="a configuration of fit; its model and data are used")
    one.add_argument("--only", nargs="+", choices=COMPARISONS, help="what to measure (default: all)")
    one.add_argument("--rows", type=int, help="packed rows to train on (default: 16)")
    one.add_argument("--sources", type=int, help="sources to load (default: 8000)")
    one.add_argument("--turns", type=int, help="turns of each side, of which the fastest counts (default: 3)")
    every = parser.add_argument_group("everything")
    every.add_argument(
        "--all",
        action="store_true",
        help="every benchmark of the project, those of the commands below too, one after the other, in about five minutes on "
        "two idle cores; texts are the documentation of this Python, and made up",
    )
    every.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="bench.json (all figures, machine, versions) and bench.md (a table) are written there, over those that are "
        f"there (default: {everything.FOLDER})",
    )
    every.add_argument(
        "--write",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="also put the table into these files, between their marks, unless one failed",
    )
    every.add_argument(
        "--small", action="store_true", help="tiny sizes, to try it out in less than a minute; the figures say little"
    )
    return parser


def _refuse(parser: argparse.ArgumentParser, given: dict[str, Any], names: Sequence[str], why: str) -> None:
    for name in names:
        if name in given:
            parser.error(f"--{name} {why}")


def _compare(*, config: Path, only: Sequence[str], rows: int, sources: int, turns: int) -> None:
    model, data = configured(config)
    data.prepare_data()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print("This takes some minutes; the machine should have nothing else to do.", file=sys.stderr)
    print(f"{config}: {torch.get_num_threads()} threads, torch {torch.__version__}, fastest of {turns} turns", flush=True)
    packed = list(islice(rows_of(data), rows)) if {"training", "lightning"} & set(only) else []
    if "training" in only:
        budget, pad_id = data.packing.capacity * data.packs_per_batch, data.encoder.pad_id
        for comparison in compare_training(model, packed, budget=budget, pad_id=pad_id, turns=turns):
            print(comparison.result, flush=True)
    if "lightning" in only:
        print(compare_lightning(model, packed, turns=turns).result, flush=True)
    if "loader" in only:
        print(compare_loader(data, sources=sources, turns=turns).result, flush=True)
