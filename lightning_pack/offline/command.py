"""``lightning-pack prepack``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Write packed rows once, to train on them as they are: encodes each source of a dataset once, packs all of them at once, and
writes the rows as an Energon dataset with a manifest. A run that was ended goes on where it was when it is started again; rows
that are complete are verified. The folder is then given to fit as --data.path.
"""


def _width(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-pack prepack",
        usage="lightning-pack prepack DATA OUT --capacity N [OPTIONS]\n       lightning-pack prepack --verify OUT",
        description=_DESCRIPTION,
        # An option that is not given is not passed on, so that defaults live in one place.
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "data", nargs="?", help="prepared dataset folder, .jsonl file or metadataset .yaml; msc://PROFILE/... too"
    )
    parser.add_argument("out", nargs="?", help="folder of the rows, on a local disk")
    parser.add_argument("--verify", metavar="OUT", help="only check that every source is there exactly once, undamaged")
    parser.add_argument("--no-progress", action="store_false", dest="progress", help="no progress bar")
    parser.add_argument("--overwrite", action="store_true", help="replace rows of other settings")
    rules = parser.add_argument_group("packing rules")
    rules.add_argument("--capacity", type=int, metavar="N", help="most tokens of a row (required)")
    rules.add_argument("--algorithm", metavar="NAME", help="of lightning_pack.binning (default: minimum_bin_slack)")
    rules.add_argument("--multiple", type=int, metavar="N", help="every source is padded to a multiple of this (default: 1)")
    rules.add_argument("--width", type=_width, metavar="W", help="variable (default), fixed, or a number of tokens")
    rules.add_argument(
        "--overlength",
        choices=("drop", "truncate", "split", "error"),
        help="what happens to a source that is longer than the capacity (default: drop)",
    )
    rules.add_argument("--max-sources", type=int, metavar="N", help="most sources of a row")
    rules.add_argument("--fixed-boundaries", action="store_true", help="rows have --max-sources boundaries each")
    rules.add_argument("--min-bins", type=int, metavar="N", help="least number of rows of each split")
    rules.add_argument("--bins-multiple-of", type=int, metavar="N", help="of the number of rows of each split (default: 1)")
    rules.add_argument("--delta", type=int, metavar="N", help="with balanced_greedy_knapsack (default: 0)")
    rules.add_argument("--max-media-tokens", type=int, metavar="N", help="most placeholders of images in a row")
    rules.add_argument("--max-media-bytes", type=int, metavar="N", help="most bytes of the pixels of a row")
    rules.add_argument("--seed", type=int, metavar="N", help="of the order of the rows (default: 0)")
    reading = parser.add_argument_group("reading and writing")
    reading.add_argument(
        "--format",
        choices=("rows", "megatron-bridge"),
        help="megatron-bridge writes Parquet files for Megatron-Bridge too, in OUT/megatron-bridge (default: rows)",
    )
    reading.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: 'tokenizer' inside the dataset)")
    reading.add_argument(
        "--vision",
        metavar="FAMILY",
        help="chats have images, for a vision-language model such as qwen3_vl (the tokenizer's folder has an image processor)",
    )
    reading.add_argument("--group-by", metavar="FIELD", help="records that differ in this field do not share a row")
    reading.add_argument("--splits", nargs="+", metavar="NAME", help="to write (default: those of train, val, test there are)")
    reading.add_argument("--workers", type=int, metavar="N", help="processes; 0 works in this one (default: 2)")
    reading.add_argument("--shards", type=int, metavar="N", help="of each split (default: one for 512 rows)")
    reading.add_argument("--on-damaged", choices=("error", "skip"), help="a sample that cannot be read (default: error)")
    return parser


def main(args: list[str]) -> None:
    """Run the command.

    Raises:
        ValueError: for settings that do not fit together, data that cannot be used, or damaged rows.
        SystemExit: with 2 for wrong usage.
    """
    parser = _parser()
    options: dict[str, Any] = vars(parser.parse_args(args))
    progress = options.pop("progress", True)
    if "verify" in options:
        folder = Path(options.pop("verify"))
        unused = [name for name, value in options.items() if value is not None]
        if unused:
            parser.error(f"--verify takes the folder alone; not used here: {', '.join(unused)}")
        from lightning_pack.offline.verification import verify

        print(verify(folder, progress=progress).summary())
        return
    data, out = options.pop("data", None), options.pop("out", None)
    if data is None or out is None:
        parser.error("DATA and OUT are needed")
    if "capacity" not in options:
        parser.error("--capacity N is needed")

    from lightning_pack.offline.prepacking import prepack

    form = options.pop("format", "rows")
    if form == "megatron-bridge":
        if "vision" in options:
            parser.error("--format megatron-bridge has no place for images: it is not used with --vision")
        # Before hours of encoding, if what it needs is not installed.
        from lightning_pack.offline.megatron_bridge import need_parquet, write_parquet

        need_parquet()
    made = prepack(data, out, progress=progress, **options)
    print(made.summary())
    if form == "megatron-bridge":
        print(f"written: {len(write_parquet(made.path, made.path / form))} Parquet files in {made.path / form}")
