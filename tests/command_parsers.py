"""The parsers of ``lightning-pack`` alone: a command line is understood as the command understands it, and nothing is done."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pytest

from lightning_pack.cli import _COMMANDS, _LIGHTNING, main
from lightning_pack.lightning_cli import _cli, _ConfigReader


class Parsed(BaseException):
    """A command has parsed its line, and would begin its work."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def refusal(args: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the parser of a command line says against it; an empty text if it takes it.

    The commands of Lightning's command line make the datamodule too, so settings that do not fit together are refused.
    """
    if args and args[0] not in {*_COMMANDS, "-h", "--help", "--version"}:
        return f"{args[0]!r} is no command"
    try:
        if args and args[0] in _LIGHTNING:
            _cli(_ConfigReader, list(args))
        else:
            with monkeypatch.context() as patch:
                parse = argparse.ArgumentParser.parse_known_args

                def and_stop(self: argparse.ArgumentParser, *given: Any, **options: Any) -> Any:
                    parse(self, *given, **options)
                    raise Parsed(self)

                def all_and_stop(self: argparse.ArgumentParser, *given: Any, **options: Any) -> Any:
                    _, rest = parse(self, *given, **options)
                    if rest:
                        self.error(f"unrecognized arguments: {' '.join(rest)}")
                    raise Parsed(self)

                patch.setattr(argparse.ArgumentParser, "parse_known_args", and_stop)
                patch.setattr(argparse.ArgumentParser, "parse_args", all_and_stop)
                main(list(args))
    except Parsed:
        pass
    except ValueError as error:
        return str(error)
    except SystemExit as end:
        if end.code not in (0, None):
            return capsys.readouterr().err
    return ""


def options_of(args: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The options of the command (not one of Lightning's) whose name begins a command line."""
    with monkeypatch.context() as patch:

        def stop(self: argparse.ArgumentParser, *given: Any, **options: Any) -> Any:
            raise Parsed(self)

        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        try:
            main([arg for arg in args if not arg.startswith("-")])
        except Parsed as parsed:
            return set(parsed.parser._option_string_actions)
    raise AssertionError(f"{args[0]} did not parse its line")
