"""``lightning-pack inspect DATA --show N``: rows instead of checkpoints."""

from __future__ import annotations

import argparse

_PACKING = ("capacity", "multiple", "overlength", "buffer_size")
_DATA = ("tokenizer", "group_by", "vision")
_OTHERS = ("json", "html", "verify", "against", "ranks")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--show`` and what goes with it."""
    group = parser.add_argument_group("rows of a dataset (a prepared folder, .jsonl file, metadataset .yaml, or packed rows)")
    group.add_argument("--show", type=int, metavar="N", help="draw the first N rows, packed in the order of training")
    group.add_argument("--full", action="store_true", help="draw all tokens, also of long sources")
    group.add_argument("--capacity", type=int, metavar="N", help="most tokens of a pack; needed, but for packed rows")
    group.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: 'tokenizer' inside the dataset)")
    group.add_argument("--multiple", type=int, metavar="N", help="every source is padded to a multiple of this (default: 1)")
    group.add_argument("--buffer-size", type=int, metavar="N", help="sources that are packed from at a time (default: 256)")
    group.add_argument(
        "--overlength",
        choices=("drop", "truncate", "split", "error"),
        help="what happens to a source that is longer than the capacity (default: drop)",
    )
    group.add_argument("--group-by", metavar="FIELD", help="records that differ in this field do not share a pack")
    group.add_argument("--vision", metavar="FAMILY", help="vision-language model that chats with images are for")


def show(options: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Draw rows if ``--show`` asks for it.

    Returns:
        Whether it does.

    Raises:
        ValueError: for settings that do not fit the data, and data that is none.
        SystemExit: with 2, for options that do not go together.
    """
    packing = {name: value for name in _PACKING if (value := getattr(options, name)) is not None}
    data = {name: value for name in _DATA if (value := getattr(options, name)) is not None}
    if options.show is None:
        if unused := [*packing, *data, *(["full"] if options.full else [])]:
            parser.error(f"{_names(unused)}: this goes with --show N, which draws rows of a dataset")
        return False
    if unused := [name for name in _OTHERS if getattr(options, name) not in (None, False)]:
        parser.error(f"{_names(unused)}: this is for checkpoints, and --show draws rows of a dataset")

    from lightning_pack.first_rows import first_rows
    from lightning_pack.terminal_console import terminal_console

    console = terminal_console()
    number = 0
    for number, row in enumerate(
        first_rows(options.path, count=options.show, **data, **packing, **({"most": None} if options.full else {})), 1
    ):
        if number > 1:
            console.print()
        if number == 1 and not row.decoded:
            console.print("There is no tokenizer with these rows, so ids are drawn: give --tokenizer DIR for texts.")
        console.print(row, soft_wrap=True)
    if number < options.show:
        console.print(f"The data has no more rows: {number} of {options.show} in one pass.")
    return True


def _names(options: list[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in options)
