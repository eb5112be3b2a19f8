"""``lightning-pack bench``: what packing gives and what it costs, as ratios within one run.

Three questions, each about a configuration of ``fit``:

* ``training``: real tokens per second, packed against padded batches of the same sources and the same token budget: of a fixed
  number of rows (what a DataLoader gives; the budget is the mean), and of as many rows as the budget holds;
* ``lightning``: a step under the Trainer against a bare loop over the same rows;
* ``loader``: sources per second of the packing loader against Energon's plain loader with the same encoder.

Both sides of a ratio are measured in turns and compared by their fastest turn, so that a busy machine hurts both alike.
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
import yaml
from jsonargparse import ArgumentParser

from lightning_pack.bench.loading import compare_loader, rows_of
from lightning_pack.bench.training import compare_lightning, compare_training
from lightning_pack.datamodule import EnergonPackDataModule
from lightning_pack.module import PackedCausalLM

COMPARISONS = ("training", "lightning", "loader")


def main(args: Sequence[str]) -> None:
    """``lightning-pack bench`` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="lightning-pack bench", description="What packing gives and costs, as ratios in one run."
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
    model, data = _read(options.config)
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


def _read(config: Path) -> tuple[PackedCausalLM, EnergonPackDataModule]:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PackedCausalLM, "model")
    parser.add_class_arguments(EnergonPackDataModule, "data")
    given = yaml.safe_load(config.read_text())
    # A schedule depends on a number of steps that is another one here.
    given.get("model", {}).update(schedule="constant", warmup_steps=0)
    try:
        parsed = parser.instantiate_classes(parser.parse_object({name: given[name] for name in ("model", "data")}))
    except KeyError as e:
        raise ValueError(f"{config} has no {e}: a configuration of fit, with model and data, is needed") from e
    return parsed.model, parsed.data
