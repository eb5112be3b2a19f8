"""``lightning-pack inspect``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
What a checkpoint holds: how far training got, where it stands in the data, and the settings that this place holds for. A folder
lists its checkpoints. No code of the file is run, and weights are not read.
"""
_EPILOG = """\
--against compares only what decides which batches come: settings of the data, the data itself, ranks and loader workers. The
model's own settings are not compared. Exit codes: 0 it would resume (or nothing was compared), 1 it would not, or the
checkpoint cannot be read, 2 wrong usage.
"""


def main(args: list[str]) -> None:
    """Run the command.

    Raises:
        UnreadableCheckpointError: for a checkpoint that cannot be read.
        SystemExit: with 1 if the checkpoint would not be resumed, 2 for wrong usage.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-pack inspect",
        usage="lightning-pack inspect CKPT [--json] [--verify] [--against CONFIG [--ranks N] [--data.OPTION VALUE ...]]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint: a file, or a sharded one; or a folder of them")
    parser.add_argument("--json", action="store_true", help="print JSON, with everything in full")
    parser.add_argument("--verify", action="store_true", help="read all of the file and compare its checksums")
    parser.add_argument(
        "--against",
        metavar="CONFIG",
        help="say whether 'fit --config CONFIG' would resume, and what differs; options of 'fit' may follow at the end",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="data-parallel ranks of that run, where CONFIG names no number")
    options, overrides = parser.parse_known_args(args)
    if options.against is None and (overrides or options.ranks is not None):
        unused = overrides or ["--ranks"]
        parser.error(f"unrecognized arguments: {' '.join(unused)} (options of 'fit' and --ranks go with --against CONFIG)")
    if options.ranks is not None and options.ranks < 1:
        parser.error(f"--ranks {options.ranks}: at least 1 is needed")
    if "://" in options.checkpoint:
        parser.error(f"{options.checkpoint} is on another machine: copy the checkpoint here first")

    from lightning_pack.checkpoints.contents import Contents
    from lightning_pack.checkpoints.file import is_sharded, read_checkpoint, verify
    from lightning_pack.checkpoints.report import described, listed, overview

    path = Path(options.checkpoint)
    if path.is_dir() and not is_sharded(path):
        if options.against or options.verify:
            parser.error(f"{path} is a folder of checkpoints: --against and --verify take one of them")
        print(json.dumps(overview(path), indent=2) if options.json else "\n".join(listed(path)))
        return
    checkpoint = read_checkpoint(path)
    contents = Contents.of(checkpoint, path)
    result: dict[str, Any] = {"checkpoint": asdict(contents)}
    lines = list(described(contents))
    if options.verify:
        result["parts_verified"] = verify(path)
        lines.append(f"  verified   all {result['parts_verified']} parts are as they were written")
    resumes = True
    if options.against is not None:
        from lightning_pack.checkpoints.against import ranks_of, verdict_of
        from lightning_pack.lightning_cli import read_config

        datamodule, trainer = read_config(options.against, overrides)
        assumed = (options.ranks, "--ranks") if options.ranks is not None else ranks_of(trainer, datamodule)
        if assumed is None:
            devices = trainer.get("devices", "auto")
            parser.error(f"trainer.devices={devices!r} in {options.against} is no number of devices: give --ranks N as well")
        verdict = verdict_of(checkpoint, path, datamodule, ranks=assumed[0], ranks_from=assumed[1])
        result["against"] = asdict(verdict)
        lines += ["", *verdict.lines(options.against)]
        resumes = verdict.resumes
    print(json.dumps(result, indent=2, default=repr) if options.json else "\n".join(lines))
    if not resumes:
        sys.exit(1)
