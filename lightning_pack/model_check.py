"""``lightning-pack check-model``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

_DESCRIPTION = """\
Whether packed rows are safe with a model: what its code and configuration say, and then a packed row of random tokens, in which
one source is changed at a time and each is compared with itself alone. Nothing is downloaded, and no code of the folder is run.
"""
_EPILOG = """\
Without weights the model is drawn at random, which is as good for this question. Exit codes: 0 the sources are isolated, 1 they
are not, the model is refused or there is none at the path, 2 wrong usage.
"""
_DTYPES = ("float32", "float64", "bfloat16", "float16")


def main(args: list[str]) -> None:
    """Run the command.

    Raises:
        ValueError: for a path that holds no model, and sizes that make no row.
        SystemExit: with 1 if the model is refused or its sources are not isolated, 2 for wrong usage.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-pack check-model",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An option that is not given is not passed on, so that defaults live in one place.
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("path", type=Path, help="folder of a model with a config.json, or a configuration file (JSON)")
    parser.add_argument("--tokens", type=int, metavar="N", help="real tokens of the row (default: 64)")
    parser.add_argument("--sources", type=int, metavar="N", help="sources of the row (default: 5)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the tokens, and of weights that are drawn (default: 0)")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the weights (default: float32, the sharpest)")
    parser.add_argument("--device", default="cpu", help="where to run, such as cuda (default: cpu)")
    options = vars(parser.parse_args(args))
    path, dtype, device = options.pop("path"), options.pop("dtype"), options.pop("device")

    # Before transformers is imported: some models ask the hub for kernels.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    from lightning_pack.attention.candidate import Candidate
    from lightning_pack.attention.check import isolation_check
    from lightning_pack.attention.inspection import inspect_model

    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    # Torch without the device's backend asserts.
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {device}: {str(error).partition(chr(10))[0]}")
    candidate = Candidate.at(path)
    empty = candidate.empty()
    size = sum(parameter.numel() for parameter in empty.parameters())
    print(f"{type(empty).__name__} of {candidate.file}, {size:,} parameters")
    findings = inspect_model(empty)
    if findings:
        print("refused: packed rows are not safe with this model")
        print("\n".join(f"  - {finding.reason}" for finding in findings))
        print("\n".join(dict.fromkeys(f"way out: {finding.way_out}" for finding in findings)))
        sys.exit(1)
    print("inspection: nothing speaks against packed rows")
    model, missing = candidate.load(dtype=getattr(torch, dtype), seed=options.get("seed", 0))
    if candidate.weights is None:
        print("weights: drawn at random, the path has none")
    else:
        print(f"weights: of {candidate.weights}" + (f", {len(missing)} drawn at random: {_few(missing)}" if missing else ""))
    torch.nn.Module.to(model, place)
    verdict = isolation_check(model, **options)
    print(verdict)
    if not verdict.isolated:
        sys.exit(1)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
