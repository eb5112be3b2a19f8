"""``lightning-pack convert``."""

from __future__ import annotations

import argparse
from pathlib import Path

_DESCRIPTION = """\
Convert packed rows of another system into rows for fit (--data.path), or back. Read are Megatron-Bridge's packed Parquet and
.npy files, packed chats of NeMo-RL and Megatron-LM (.jsonl, 'messages') and collated batches with packed_cu_seqlens (.jsonl,
.npz, .pt); which it is, is seen by the file. Nothing is packed again.
"""


def main(args: list[str]) -> None:
    """Run the command.

    Raises:
        ValueError: for a file that cannot be used, naming the row, or settings that do not fit.
        SystemExit: with 2 for wrong usage.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-pack convert",
        description=_DESCRIPTION,
        # An option that is not given is not passed on, so that defaults live in one place.
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("source", help="file or folder of files; with --to a folder of packed rows")
    parser.add_argument("out", help="folder for the rows")
    parser.add_argument("--to", choices=("megatron-bridge",), help="write packed rows as Parquet that Megatron-Bridge reads")
    parser.add_argument("--val", metavar="FILE", help="file or folder for the split val")
    parser.add_argument("--capacity", type=int, metavar="N", help="most places of a row (default: as the longest row)")
    parser.add_argument("--multiple", type=int, metavar="N", help="of the places that a source takes up (default: 1)")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer; needed for chats")
    parser.add_argument(
        "--overlength",
        choices=("drop", "truncate", "error"),
        help="with chats: a conversation for which its row has no room (default: drop)",
    )
    parser.add_argument("--pad-id", type=int, metavar="N", help="fills gaps (default: that of the tokenizer, or 0)")
    parser.add_argument("--on-bad-row", choices=("error", "skip"), help="a row that does not say what it must (default: error)")
    parser.add_argument("--overwrite", action="store_true", help="replace other rows")
    options = vars(parser.parse_args(args))
    source, out = options.pop("source"), options.pop("out")
    if options.pop("to", None) is not None:
        if options:
            parser.error(f"--to takes the two folders alone; not used here: {', '.join(options)}")
        from lightning_pack.offline.megatron_bridge import write_parquet

        for path in write_parquet(Path(source), Path(out)):
            print(f"written: {path}")
        return

    from lightning_pack.offline.conversion import PADS_COUNT, convert

    made = convert(source, out, **options)
    print(made.summary())
    if made.manifest.origin != "chat-rows":
        print(f"note: {PADS_COUNT}")
