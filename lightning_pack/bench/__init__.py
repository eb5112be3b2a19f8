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
``lightning-pack bench owners`` compares the three places where packing may happen, see :mod:`lightning_pack.bench.owners`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch

from lightning_pack.bench import attention, bins, owners, resume, stream
from lightning_pack.bench.configuration import configured
from lightning_pack.bench.loading import compare_loader, rows_of
from lightning_pack.bench.training import compare_lightning, compare_training

COMPARISONS = ("training", "lightning", "loader")


def main(args: Sequence[str]) -> None:
    """``lightning-pack bench`` with these arguments."""
    if args and args[0] == "resume":
        resume.main(args[1:])
        return
    if args and args[0] == "bins":
        bins.main(args[1:])
        return
    if args and args[0] == "stream":
        stream.main(args[1:])
        return
    if args and args[0] == "attention":
        attention.main(args[1:])
        return
    if args and args[0] == "owners":
        owners.main(args[1:])
        return
    parser = argparse.ArgumentParser(
        prog="lightning-pack bench",
        description="What packing gives and costs, as ratios in one run.",
        epilog="'lightning-pack bench resume' measures what the position in a checkpoint costs, 'lightning-pack bench bins' "
        "compares the packers, 'lightning-pack bench stream' compares them on streams, 'lightning-pack bench attention' "
        "measures attention by boundaries against a mask, 'lightning-pack bench owners' compares packing while reading, ahead, "
        "and in the trainer.",
    )
    parser.add_argument("-c", "--config", type=Path, required=True, help="a configuration of fit; its model and data are used")
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=COMPARISONS, help="what to measure (default: all)")
    parser.add_argument("--rows", type=int, default=16, help="packed rows to train on (default: 16)")
    parser.add_argument("--sources", type=int, default=8_000, help="sources to load (default: 8000)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each side, of which the fastest counts (default: 3)")
    options = parser.parse_args(args)
    for name in ("rows", "sources", "turns"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1 is needed")
    model, data = configured(options.config)
    data.prepare_data()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print("This takes some minutes; the machine should have nothing else to do.", file=sys.stderr)
    print(
        f"{options.config}: {torch.get_num_threads()} threads, torch {torch.__version__}, fastest of {options.turns} turns",
        flush=True,
    )
    rows = list(islice(rows_of(data), options.rows)) if {"training", "lightning"} & set(options.only) else []
    if "training" in options.only:
        budget, pad_id = data.packing.capacity * data.packs_per_batch, data.encoder.pad_id
        print(*compare_training(model, rows, budget=budget, pad_id=pad_id, turns=options.turns), sep="\n", flush=True)
    if "lightning" in options.only:
        print(compare_lightning(model, rows, turns=options.turns), flush=True)
    if "loader" in options.only:
        print(compare_loader(data, sources=options.sources, turns=options.turns), flush=True)
