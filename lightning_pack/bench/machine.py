"""Where a benchmark ran, and with which versions."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "transformers", "lightning", "megatron-energon", "lightning-pack")
#: Load per core from which on a machine is busy: what else runs takes a good part of it.
BUSY = 0.5


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The computer.

    Args:
        cpu: model of its processor.
        cores: that this process may use.
        memory: bytes.
        system: operating system with its version.
    """

    cpu: str
    cores: int
    memory: int
    system: str

    @classmethod
    def here(cls) -> Machine:
        """The one that this runs on."""
        return cls(cpu=_cpu(), cores=_cores(), memory=_memory(), system=platform.platform())

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {self.memory / 2**30:.0f} GiB, {self.system}"


def _cpu() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def load() -> float | None:
    """Processes that ran or wanted to, on average of the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter, by name; without lightning-pack where it runs uninstalled, from its files."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def threads() -> int:
    """Of torch, for each process."""
    return torch.get_num_threads()


def commit() -> str | None:
    """The commit of lightning-pack, with ``+`` if files differ from it; None if it does not run from a clone of itself."""
    package = Path(__file__).parent.parent

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], cwd=package, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    # An installed package may lie in the clone of something else, which does not track it.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = git("rev-parse", "--short=12", "HEAD")
    return head if head is None else head + ("+" if git("status", "--porcelain", "--", ".") else "")
