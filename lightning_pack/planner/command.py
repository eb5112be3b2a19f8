"""``lightning-pack plan``."""

from __future__ import annotations

import argparse
from pathlib import Path

_DESCRIPTION = """\
Which algorithm, buffer size and capacity suit a dataset: reads the first sources as training would, packs their lengths with
each combination, and recommends one. Nothing is trained and nothing is changed.
"""


def main(args: list[str]) -> None:
    """Run the command.

    Raises:
        ValueError: for settings that do not fit together, or a dataset that cannot be used.
        MissingPlotError: with ``--out`` and without matplotlib; everything but the picture is written.
        SystemExit: with 2 for wrong usage.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-pack plan",
        description=_DESCRIPTION,
        # An option that is not given is not passed on, so that defaults live in one place.
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("data", help="prepared dataset folder, .jsonl file or metadataset .yaml; msc://PROFILE/... too")
    parser.add_argument("--capacity", type=int, metavar="N", required=True, help="most tokens of a pack")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: 'tokenizer' inside the dataset)")
    parser.add_argument("--workers", type=int, metavar="N", help="loader workers of a rank (default: 2)")
    parser.add_argument("--ranks", type=int, metavar="N", help="data-parallel ranks, whose work is compared (default: 1)")
    parser.add_argument("--multiple", type=int, metavar="N", help="every source is padded to a multiple of this (default: 1)")
    parser.add_argument(
        "--buffer-sizes", type=int, nargs="+", metavar="N", help="sources that a loader worker holds (default: 16 64 256 1024)"
    )
    parser.add_argument(
        "--capacities", type=int, nargs="+", metavar="N", help="to compare with (default: half and twice the capacity)"
    )
    parser.add_argument(
        "--overlength",
        choices=("drop", "truncate", "split", "error"),
        help="what happens to a source that is longer than the capacity (default: drop)",
    )
    parser.add_argument("--group-by", metavar="FIELD", help="records that differ in this field do not share a pack")
    parser.add_argument(
        "--vision", metavar="FAMILY", help="vision-language model that chats with images are for, such as qwen3_vl"
    )
    for name, what in (
        ("max-media-tokens", "placeholders of images in a pack"),
        ("max-media-bytes", "bytes of their pixels"),
        ("buffer-media-tokens", "placeholders in a buffer"),
        ("buffer-media-bytes", "bytes of encoded images in a buffer"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"most {what} (default: no limit)")
    parser.add_argument("--sources", type=int, metavar="N", help="most sources to read and to pack (default: 20000)")
    parser.add_argument(
        "--measure-seconds",
        type=float,
        metavar="S",
        help="how long a loader worker is run at most to measure its memory (default: 30 for data with images, else 0: not)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for plan.json, plan.yaml and plan.png")
    options = vars(parser.parse_args(args))
    data, out = options.pop("data"), options.pop("out", None)

    from lightning_pack.planner.dry_run import plan

    found = plan(data, **options)
    block = found.yaml()
    print(found.report(), "", "Paste into the configuration of fit, or give it as another --config:", block, sep="\n", end="")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "plan.json").write_text(found.to_json() + "\n")
        (out / "plan.yaml").write_text(block)
        print(f"\nwritten: {out / 'plan.json'}, {out / 'plan.yaml'}", flush=True)
        found.figure().savefig(out / "plan.png", format="png", dpi=120)
        print(f"written: {out / 'plan.png'}")
