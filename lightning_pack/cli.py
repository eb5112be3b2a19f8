"""The ``lightning-pack`` command: train and evaluate packed models, prepare data, plan, check, measure.

``fit``, ``validate`` and ``test`` are Lightning's command line over
:class:`~lightning_pack.module.PackedCausalLM` and :class:`~lightning_pack.datamodule.EnergonPackDataModule`, with
:class:`~lightning_pack.callbacks.PackedAttention` always there. Heavy imports wait until a command needs them.

Exit codes: 0 done, 1 the command failed, 2 the command line or configuration is wrong, 130 interrupted, 141 nobody
reads the output any more, 143 ended by SIGTERM.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

#: Environment variable that, like ``--traceback``, shows where an error was raised.
TRACEBACK = "LIGHTNING_PACK_TRACEBACK"

_COMMANDS = {
    "fit": "train a model on packed rows; --ckpt_path FILE goes on exactly where a run stopped",
    "validate": "evaluate on the split val",
    "test": "evaluate on the split test",
    "prepare": "turn a .jsonl file, Python's own documentation, or captioned images into a dataset",
    "prepack": "write packed rows once, to train on them as they are; check those that are written",
    "convert": "turn packed rows of other systems into ours, or ours into theirs",
    "plan": "find out which packing suits a dataset, by dry runs over the lengths of its samples",
    "check-model": "find out whether packed rows are safe with a model: its sources must not see each other",
    "inspect": "report on a run or a checkpoint, tell whether a run would go on from it, or draw the rows of a dataset",
    "bench": "measure what packing gives and costs, as ratios in one run",
}
_LIGHTNING = ("fit", "validate", "test")


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line.

    Args:
        args: what follows the program's name; None takes it from ``sys.argv``.

    Raises:
        SystemExit: with the exit code, unless the command succeeded.
    """
    given = list(sys.argv[1:] if args is None else args)
    traceback = "--traceback" in given or os.environ.get(TRACEBACK, "0") not in ("", "0")
    given = [arg for arg in given if arg != "--traceback"]
    try:
        try:
            _run(given)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("lightning-pack: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            # As 'head' does once it has its lines. Python would complain when it flushes at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)
        if traceback or not _is_for_users(error):
            raise
        hint = f"(--traceback, or {TRACEBACK}=1, shows where this was raised)"
        print(f"lightning-pack: error: {_message(error)}\n{hint}", file=sys.stderr)
        sys.exit(1)


def _nobody_reads() -> bool:
    """Whether stdout is a pipe whose reader has gone."""
    try:
        out = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(out, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _run(args: list[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        print(_overview(), file=sys.stdout if args else sys.stderr)
        sys.exit(0 if args else 2)
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"lightning-pack {version('lightning-pack')}")
    elif args[0] == "prepare":
        _prepare(args[1:])
    elif args[0] == "bench":
        from lightning_pack.bench import main as bench

        bench(args[1:])
    elif args[0] == "plan":
        from lightning_pack.planner.command import main as plan

        plan(args[1:])
    elif args[0] == "prepack":
        from lightning_pack.offline.command import main as prepack

        prepack(args[1:])
    elif args[0] == "convert":
        from lightning_pack.offline.convert_command import main as convert

        convert(args[1:])
    elif args[0] == "inspect":
        from lightning_pack.checkpoints.command import main as inspect

        inspect(args[1:])
    elif args[0] == "check-model":
        from lightning_pack.model_check import main as check_model

        check_model(args[1:])
    elif args[0] in _LIGHTNING:
        from lightning_pack.lightning_cli import run

        run(args)
    else:
        close = difflib.get_close_matches(args[0], _COMMANDS, n=1)
        meant = f" (is {close[0]} meant?)" if close else ""
        _refuse(f"{args[0]!r} is no command{meant}; the commands are {', '.join(_COMMANDS)} (lightning-pack --help)")


def _overview() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:{width}}  {purpose}" for name, purpose in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: lightning-pack COMMAND [OPTIONS]",
            "",
            "Online sequence packing for PyTorch Lightning.",
            "",
            "commands:",
            *lines,
            "",
            "lightning-pack COMMAND --help explains a command. --traceback with any command shows where an error was raised.",
        ]
    )


def _refuse(message: str) -> NoReturn:
    print(f"lightning-pack: error: {message}", file=sys.stderr)
    sys.exit(2)


def _prepare(args: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lightning-pack prepare",
        description=_COMMANDS["prepare"],
        # An option that is not given is not passed on, so that defaults live in one place.
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        help="'stdlib' for the documentation of this Python, 'skimage' for the captioned images of scikit-image, or a file "
        "with one JSON object a line",
    )
    parser.add_argument("out", help="folder of the dataset; msc://PROFILE/... for one in an object store")
    parser.add_argument("--val-fraction", type=float, metavar="F", help="share of the records for validation (default: 0.05)")
    parser.add_argument("--shards", type=int, metavar="N", help="training shards, at most (default: 8)")
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset that was prepared with other settings")
    parser.add_argument("--no-progress", action="store_false", dest="progress", help="no progress bar")
    stdlib = parser.add_argument_group("with 'stdlib' and 'skimage'")
    stdlib.add_argument(
        "--vocab-size", type=int, metavar="N", help="tokens of the tokenizer that is trained (default: 4096; 1024)"
    )
    jsonl = parser.add_argument_group("with a file")
    jsonl.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer (required)")
    jsonl.add_argument(
        "--vision", metavar="FAMILY", help="chats have images, for a vision-language model such as qwen3_vl (DIR is its folder)"
    )
    jsonl.add_argument(
        "--on-bad-line",
        choices=("error", "skip"),
        help="list lines that are not usable and stop, or skip them (default: error)",
    )
    options = vars(parser.parse_args(args))
    source, out = options.pop("source"), options.pop("out")
    own = source in ("stdlib", "skimage")
    other = ("tokenizer", "on_bad_line", "vision") if own else ("vocab_size",)
    for name in other:
        if name in options:
            kind = "a file" if own else "'stdlib'"
            parser.error(f"--{name.replace('_', '-')} is not used here: it goes with {kind}, and the source is {source!r}")
    if source == "skimage":
        from lightning_pack.prepare import prepare_skimage

        print(prepare_skimage(out, **options).summary())
        return
    if source == "stdlib":
        from lightning_pack.prepare import prepare_stdlib

        print(prepare_stdlib(out, **options).summary())
        return
    if "tokenizer" not in options:
        parser.error("--tokenizer DIR is needed with a file")
    from lightning_pack.prepare import prepare_jsonl

    print(prepare_jsonl(Path(source), out, **options).summary())


#: What to do about errors of the operating system.
_WAYS_OUT = {
    errno.EACCES: "you may not read or write there: choose another folder, or change its permissions",
    errno.EPERM: "you may not read or write there: choose another folder, or change its permissions",
    errno.EROFS: "choose a folder that can be written to",
    errno.ENOSPC: "make room there and where the output goes, or choose a folder on another disk",
    errno.EDQUOT: "make room within your quota, or choose a folder on another disk",
    errno.ENOENT: "correct the path: what it names, or the folder around it, is not there",
    errno.EISDIR: "a folder stands where a file is needed: choose another path",
    errno.ENOTDIR: "a file stands where a folder is needed: choose another path",
    errno.EEXIST: "a file stands where a folder is needed: choose another path",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n), or use fewer shards and workers",
}


def _message(error: Exception) -> str:
    """An error in a sentence; one of the operating system with what to do about it instead of its number."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    where = "" if error.filename is None else f"{error.filename}: "
    way_out = _WAYS_OUT.get(error.errno or 0)
    return f"{where}{error.strerror}" + ("" if way_out is None else f" ({way_out})")


#: Errors that are an answer to the user, beside ValueError and OSError. Where one was raised, its module is loaded.
_ANSWERS = (
    ("lightning.fabric.utilities.exceptions", "MisconfigurationException"),
    # Of the configuration that is saved beside a run.
    ("jsonargparse._paths", "PathError"),
    ("lightning_pack.energon.worker", "WorkerFailedError"),
    ("lightning_pack.callbacks.memory_probe", "MemoryProbeError"),
)


def _is_for_users(error: Exception) -> bool:
    answers = [getattr(sys.modules[module], name) for module, name in _ANSWERS if module in sys.modules]
    return isinstance(error, (ValueError, OSError, *answers))
