from __future__ import annotations

import subprocess
import sys

import pytest

import lightning_pack


def test_public_names_are_sorted_and_there() -> None:
    assert lightning_pack.__all__ == sorted(lightning_pack._HOMES)
    for name in lightning_pack.__all__:
        assert getattr(lightning_pack, name).__name__ == name
        assert name in dir(lightning_pack)
    with pytest.raises(AttributeError, match="no attribute 'Packer'"):
        lightning_pack.Packer  # noqa: B018


def test_rules_and_rows_need_neither_lightning_nor_energon() -> None:
    code = (
        "import sys\n"
        "from lightning_pack import PackedBatch, PackingPolicy, ParallelLayout\n"
        "import lightning_pack.encoders\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert 'lightning' not in loaded and 'megatron' not in loaded, loaded\n"
        "import lightning_pack.energon, lightning_pack.prepare, lightning_pack.attention\n"
        "assert 'lightning' not in {name.partition('.')[0] for name in sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
