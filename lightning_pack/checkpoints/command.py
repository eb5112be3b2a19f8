"""``lightning-pack inspect``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_pack.checkpoints.show_command import add_options, show

_USAGE = """\
lightning-pack inspect RUN [--html FILE] [--json]
       lightning-pack inspect CKPT [--html FILE] [--json] [--verify] [--against CONFIG [--ranks N] [--data.OPTION VALUE ...]]
       lightning-pack inspect DATA --show N [--full] [--capacity N] [--tokenizer DIR] [OPTIONS OF THE PACKING]"""
_DESCRIPTION = """\
What a run left behind. Of a checkpoint: how far training got, where it stands in the data, the settings that this place holds
for, and a report of the training up to it: fill over time, waste by cause, what was left out, throughput. Of a folder of
checkpoints, or of a run: a list, and the report of the one with the most steps. No code of a file is run, and weights are not
read. Of a dataset, with --show: its first rows, packed, as texts.
"""
_EPILOG = """\
--against compares only what decides which batches come: settings of the data, the data itself, ranks and loader workers. The
model's own settings are not compared. Exit codes: 0 it would resume (or nothing was compared), 1 it would not, or the
checkpoint cannot be read, 2 wrong usage.
"""
#: Endings of data that is a file.
_DATA = (".jsonl", ".yaml", ".yml", ".tar")


def main(args: list[str]) -> None:
    """Run the command.

    Raises:
        UnreadableCheckpointError: for a checkpoint that cannot be read.
        ValueError: for a report that cannot be written, and rows that cannot be drawn.
        SystemExit: with 1 if the checkpoint would not be resumed, 2 for wrong usage.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-pack inspect",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help="checkpoint: a file, or a sharded one; a folder of them; or a dataset")
    parser.add_argument("--json", action="store_true", help="print JSON, with everything in full")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one HTML file, which needs nothing else")
    parser.add_argument("--verify", action="store_true", help="read all of the file and compare its checksums")
    parser.add_argument(
        "--against",
        metavar="CONFIG",
        help="say whether 'fit --config CONFIG' would resume, and what differs; options of 'fit' may follow at the end",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="data-parallel ranks of that run, where CONFIG names no number")
    add_options(parser)
    options, overrides = parser.parse_known_args(args)
    if options.against is None and (overrides or options.ranks is not None):
        unused = overrides or ["--ranks"]
        parser.error(f"unrecognized arguments: {' '.join(unused)} (options of 'fit' and --ranks go with --against CONFIG)")
    if options.ranks is not None and options.ranks < 1:
        parser.error(f"--ranks {options.ranks}: at least 1 is needed")
    if show(options, parser):
        return
    if "://" in options.path:
        parser.error(f"{options.path} is on another machine: copy the checkpoint here first")
    if options.json and options.html is not None:
        parser.error("--json and --html are two forms of the report: give one of them")

    from lightning_pack.checkpoints.file import is_sharded
    from lightning_pack.checkpoints.report import listed, overview
    from lightning_pack.checkpoints.run_folder import last_of

    path, chosen = Path(options.path), None
    if path.suffix in _DATA and path.is_file():
        raise ValueError(f"{path} is data, and no checkpoint: '--show 3 --capacity N' draws its first rows")
    if path.is_dir() and not is_sharded(path):
        if options.against or options.verify:
            parser.error(f"{path} is a folder of checkpoints: --against and --verify take one of them")
        if options.json:
            print(json.dumps(overview(path), indent=2))
            return
        if options.html is None:
            print("\n".join(listed(path)), end="\n\n")
        last = last_of(path)
        path, chosen = last.path, last.how
    if not _report(path, options, overrides, parser, chosen=chosen):
        sys.exit(1)


def _report(
    path: Path,
    options: argparse.Namespace,
    overrides: list[str],
    parser: argparse.ArgumentParser,
    *,
    chosen: str | None,
) -> bool:
    """Tell of one checkpoint; whether it would be resumed, or nothing was compared."""
    from lightning_pack.checkpoints.contents import Contents
    from lightning_pack.checkpoints.file import read_checkpoint, verify
    from lightning_pack.checkpoints.page import check_target, page, write
    from lightning_pack.checkpoints.record import training_record
    from lightning_pack.checkpoints.report import described
    from lightning_pack.checkpoints.terminal import shown
    from lightning_pack.terminal_console import terminal_console

    if options.html is not None:
        check_target(options.html)
    checkpoint = read_checkpoint(path)
    contents = Contents.of(checkpoint, path)
    record = training_record(checkpoint)
    training = {"problem": record} if isinstance(record, str) else record.to_plain()
    result: dict[str, Any] = {"checkpoint": asdict(contents), "training": training}
    lines = list(described(contents))
    if options.verify:
        result["parts_verified"] = verify(path)
        lines.append(f"  verified   all {result['parts_verified']} parts are as they were written")
    resumes, compared = True, []
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
        compared = ["", *verdict.lines(options.against)]
        resumes = verdict.resumes
    if options.json:
        print(json.dumps(result, indent=2, default=repr))
        return resumes
    if options.html is not None:
        write(options.html, page(contents, record, details=[*lines, *compared], chosen=chosen))
        told = [] if chosen is None else [chosen]
        print("\n".join([*told, *compared[1:], f"written: {options.html}"]))
        return resumes
    print("\n".join([*([] if chosen is None else [chosen]), *lines]))
    shown(terminal_console(), contents, record)
    if compared:
        print("\n".join(compared))
    return resumes
