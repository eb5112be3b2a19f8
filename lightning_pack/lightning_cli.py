"""Lightning's command line for packed causal language models."""

from __future__ import annotations

import difflib
import logging
import os
import re
import signal
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from traceback import walk_tb
from typing import Any, NoReturn, TypeVar

from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pack.callbacks import PackedAttention
from lightning_pack.checkpoints.file import checkpoints_in, read_checkpoint
from lightning_pack.datamodule import EnergonPackDataModule
from lightning_pack.location import location
from lightning_pack.module import PackedCausalLM
from lightning_pack.nested_options import with_whole_parts
from lightning_pack.offline.manifest import Manifest
from lightning_pack.run_folder import own_folders, warn_of_older_checkpoints

#: Beginnings of Lightning's messages that tell a user of this command nothing.
_CHATTER = ("GPU available: False", "TPU available: False", "HPU available: False", "💡 Tip:", "`weights_only` was not set")
#: Words for a checkpoint that Lightning looks for by itself.
_CHOSEN_BY_LIGHTNING = ("best", "last", "hpc", "registry")
#: Warnings about what holds here by design, or is not the user's to change.
_WARNINGS = (
    r"You're resuming from a checkpoint that ended before the epoch ended",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"The '\w+_dataloader' does not have many workers",
    r"Checkpoint directory .* exists and is not empty",
)


def _said(parser: LightningArgumentParser, args: list[str], *, capacity: str = "1") -> Namespace:
    """What arguments and configuration files set, without defaults."""
    args = [arg for arg in args if not _asks_to_print(arg)]
    # A capacity is required then; this one comes first, so that one that is given takes its place.
    first = [args[0], "--data.packing.capacity", capacity, *args[1:]]
    config = parser.parse_args(first, defaults=False, _skip_validation=True)
    return config[config.subcommand]


def _given_packing(parser: LightningArgumentParser, args: list[str]) -> frozenset[str]:
    """Names of the packing rules that arguments and configuration files set."""
    found = []
    for capacity in ("1", "2"):
        found.append(_said(parser, args, capacity=capacity).data.packing)
    names = set(found[0].keys())
    return frozenset(names if found[0].capacity == found[1].capacity else names - {"capacity"})


def _asks_to_print(arg: str) -> bool:
    return arg.partition("=")[0] == "--print_config"


def _leave_unsaid(data: Namespace, given: frozenset[str]) -> None:
    """Take packing rules that nobody said out of the configuration of rows that are decided, which they would contradict."""
    path = data.get("path")
    manifest = None if path is None else Manifest.read(location(path))
    if manifest is None:
        return
    for name in set(data.packing.keys()) - given:
        del data.packing[name]
    if "capacity" not in given:
        data.packing.capacity = manifest.packing["capacity"]


class _Parser(LightningArgumentParser):
    #: Packing rules that were said, where the configuration is only printed.
    given: frozenset[str] | None = None

    def dump(self, namespace: Namespace, *args: Any, **options: Any) -> str:
        """The configuration as text."""
        if self.given is not None:
            namespace = namespace.clone()
            _leave_unsaid(namespace.data, self.given)
        return str(super().dump(namespace, *args, **options))

    def print_usage(self, file: Any = None) -> None:
        """Nothing: before an error, eighty lines of usage would hide it; --help shows them."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End with the message, and what was probably meant."""
        super().error(message + self._meant(message), ex)

    def _meant(self, message: str) -> str:
        if message.startswith("the following arguments are required"):
            return (
                "\nA configuration sets them, and all others: --config FILE (configs/README.md lists some to start from); or "
                "give them one by one"
            )
        if message.startswith("Unexpected config:"):
            return "\nA configuration file holds settings by their names (configs/README.md lists some to start from)"
        # What is wrong in a configuration file, the parser of all commands tells.
        parsers = [self, *(self._subcommands_action._name_parser_map.values() if self._subcommands_action else ())]
        options = [
            option
            for parser in parsers
            for action in parser._actions
            for option in action.option_strings
            if option.startswith("--")
        ]
        if message.startswith("unrecognized arguments: "):
            unknown = [arg.partition("=")[0] for arg in message.partition(": ")[2].split() if arg.startswith("--")]
        elif keys := re.search(r"does not accept option '([\w.]+)'", message):
            unknown, options = [keys[1]], [option.removeprefix("--") for option in options]
        else:
            return ""
        found = {name: difflib.get_close_matches(name, options, n=1, cutoff=0.8) for name in unknown}
        return "".join(f"\n{name}: {close[0]} may be meant" for name, close in found.items() if close)


class PackCLI(LightningCLI):
    """``fit``, ``validate`` and ``test``; ``predict`` has no meaning for :class:`PackedCausalLM` yet."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The Trainer's methods that are commands."""
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name != "predict"}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Make packed attention always there, and configurable as ``--attention.*``."""
        parser.add_lightning_class_args(PackedAttention, "attention")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse a list of arguments that came from the command line itself."""
        args = with_whole_parts(args, lambda others: _said(parser, others).model.model)
        if any(map(_asks_to_print, args)):
            printed = self._parser(args[0])
            assert isinstance(printed, _Parser)
            printed.given = _given_packing(parser, args)
        self.config = parser.parse_args(args)
        self._given = _given_packing(parser, args)
        # It is saved too.
        _leave_unsaid(self.config[self.config.subcommand].data, self._given)

    def instantiate_classes(self) -> None:
        """Also tell the datamodule which packing rules are the user's."""
        super().instantiate_classes()
        self.datamodule.given_packing = self._given

    def _parse_ckpt_path(self) -> None:
        # Lightning puts the checkpoint's settings of the model over those given; a given one must not be lost silently.
        given = self._model_settings()
        path = self.config[self.config.subcommand].get("ckpt_path")
        _refuse_no_checkpoint(path)
        try:
            super()._parse_ckpt_path()
        except Exception:  # torch raises whatever the bytes of the file lead to
            read_checkpoint(Path(path))
            raise
        now = self._model_settings()
        different = [line for name in given for line in _different(f"model.{name}", now.get(name), given[name])]
        if different:
            values = "\n  ".join(different)
            raise ValueError(
                f"{path} holds a model with other settings:\n  {values}\nSet them back to what the checkpoint says, or start a "
                "new run"
            )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer.

        Raises:
            ValueError: for ``accelerator="gpu"`` where there is none; Lightning's own error names no way out.
        """
        try:
            return super().instantiate_trainer(**kwargs)
        except MisconfigurationException as error:
            if "No supported gpu backend found" in str(error):
                raise ValueError(
                    "trainer.accelerator='gpu': torch finds no GPU on this machine: install a build of torch for the one it "
                    "has, or try a small model with --trainer.accelerator cpu"
                ) from error
            raise

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            if subcommand == "fit":
                self._fit_alone()
            else:
                super()._run_subcommand(subcommand)
        except SIGTERMException as e:
            # It is a SystemExit without a code, which would count as done.
            raise SystemExit(128 + signal.SIGTERM) from e
        except SystemExit as e:
            # Lightning ends an interrupted run with 1, as one that failed.
            if isinstance(e.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise
        except Exception as e:
            path = self.trainer.ckpt_path
            if path is not None and Path(path).exists() and _while_reading(e):
                read_checkpoint(Path(path))
            raise

    def _fit_alone(self) -> None:
        with own_folders(self.trainer):
            if self.config["fit"].get("ckpt_path") is None:
                warn_of_older_checkpoints(self.trainer)
            super()._run_subcommand("fit")

    def _model_settings(self) -> dict[str, Any]:
        settings = self.config[self.config.subcommand].get("model")
        return {} if settings is None else settings.as_dict()


def _different(name: str, saved: Any, now: Any) -> Iterator[str]:
    """What differs of two values, inside parts of a configuration by their own names."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for part in {**saved, **now}:
            if part in saved and part in now:
                yield from _different(f"{name}.{part}", saved[part], now[part])
            else:
                old, new = (repr(value[part]) if part in value else "not set" for value in (saved, now))
                yield f"{name}.{part}: {old} in the checkpoint, {new} now"
    elif saved != now:
        yield f"{name}: {saved!r} in the checkpoint, {now!r} now"


class _ConfigReader(PackCLI):
    """Understands a configuration of ``fit`` and makes nothing but the datamodule."""

    def _parse_ckpt_path(self) -> None: ...

    def _set_seed(self) -> None: ...

    def _add_instantiators(self) -> None: ...

    def instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        self.settings: dict[str, Any] = config.trainer.as_dict()
        parser = LightningArgumentParser()
        parser.add_lightning_class_args(EnergonPackDataModule, "data")
        self.datamodule: EnergonPackDataModule = parser.instantiate_classes(Namespace(data=config.data)).data
        self.datamodule.given_packing = self._given

    def _run_subcommand(self, subcommand: str) -> None: ...


def read_config(config: str, overrides: Sequence[str] = ()) -> tuple[EnergonPackDataModule, dict[str, Any]]:
    """The datamodule that ``fit --config CONFIG`` would make, and the Trainer's settings.

    Args:
        config: file.
        overrides: further options of the command line.

    Raises:
        SystemExit: with 2, for a configuration that ``fit`` would not take.
        ValueError: for settings of the data that do not fit together.
    """
    _quiet()
    reader = _cli(_ConfigReader, ["fit", "--config", config, *overrides])
    return reader.datamodule, reader.settings


def run(args: list[str]) -> None:
    """Run one of Lightning's commands; ``args[0]`` is its name."""
    _quiet()
    _cli(PackCLI, args)


_CLI = TypeVar("_CLI", bound=PackCLI)


def _cli(kind: type[_CLI], args: list[str]) -> _CLI:
    return kind(
        PackedCausalLM,
        EnergonPackDataModule,
        args=args,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        parser_class=_Parser,
        parser_kwargs={"prog": "lightning-pack", "allow_abbrev": False},
        auto_configure_optimizers=False,
    )


def _refuse_no_checkpoint(path: str | None) -> None:
    """Check that there is something at ``ckpt_path``, before a model is made for nothing.

    Raises:
        ValueError: naming the newest checkpoint of the folder, if it has one.
    """
    if path is None or path in _CHOSEN_BY_LIGHTNING or "://" in path:
        return
    place = Path(path)
    folder = place if place.is_dir() else place.parent
    found = checkpoints_in(folder) if folder.is_dir() else []
    newest = f"the newest checkpoint in {folder} is {found[0]}" if found else f"there is no checkpoint in {folder} either"
    if not place.exists():
        raise ValueError(f"ckpt_path={path!r}: there is no such file; {newest}. Leave ckpt_path out to start a new run")
    if place.is_dir() and found:
        raise ValueError(f"ckpt_path={path!r} is a folder of checkpoints: name one of them; {newest}")


def _while_reading(error: Exception) -> bool:
    """Whether an error was raised while Lightning read a checkpoint."""
    return any(frame.f_code is _CheckpointConnector.resume_start.__code__ for frame, _ in walk_tb(error.__traceback__))


def _quiet() -> None:
    # Before workers are forked and tokenizers used.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().lstrip().startswith(_CHATTER)
