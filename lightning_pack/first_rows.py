"""The first rows of a dataset, packed as training would pack them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_pack.checkpoints.file import SUFFIXES, is_sharded
from lightning_pack.datamodule import EnergonPackDataModule
from lightning_pack.energon.dataset import has_end
from lightning_pack.offline.manifest import Manifest
from lightning_pack.policy import PackingPolicy
from lightning_pack.row_picture import RowPicture, draw


def first_rows(
    path: str | Path,
    *,
    count: int,
    tokenizer: str | Path | None = None,
    group_by: str | None = None,
    vision: str | None = None,
    most: int | None = 240,
    **packing: Any,
) -> Iterator[RowPicture]:
    """Read, encode and pack in this process, in the order of training, without training; at most one pass over the data.

    Args:
        path: dataset, or a folder of packed rows.
        count: rows.
        tokenizer: folder; None takes the folder ``tokenizer`` inside ``path``.
        group_by: as for the datamodule.
        vision: as for the datamodule.
        most: as for :func:`~lightning_pack.row_picture.draw`.
        **packing: of :class:`PackingPolicy`; ``capacity`` is needed but for packed rows, which take none.

    Raises:
        ValueError: for settings that do not fit the data, and data that is none.
    """
    if count < 1:
        raise ValueError(f"--show {count}: at least 1 row is needed")
    if "://" not in str(path) and not Path(path).exists():
        raise ValueError(f"there is no dataset at {str(path)!r}: correct the path, or make one with 'lightning-pack prepare'")
    settings = {**packing, "group_by": group_by, "vision": vision}
    given = [name for name, value in settings.items() if value is not None]
    if Path(path).suffix in SUFFIXES or (Path(path).is_dir() and is_sharded(Path(path))):
        raise ValueError(f"{str(path)!r} is a checkpoint, which has no rows: leave --show out, or name a dataset")
    if Manifest.read(path) is not None:
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{str(path)!r} holds packed rows, which are decided: leave {options} out")
        data = EnergonPackDataModule(path, tokenizer=tokenizer, num_workers=0, epochs=1)
    else:
        if packing.get("capacity") is None:
            raise ValueError(
                f"give --capacity N, the most tokens of a pack, to pack the rows of {str(path)!r} (of a run, leave --show out)"
            )
        ends = has_end(str(path), "train")
        data = EnergonPackDataModule(
            path,
            tokenizer=tokenizer,
            group_by=group_by,
            vision=vision,
            packing=PackingPolicy(**packing),
            num_workers=0,
            epochs=1 if ends else None,
        )
    data.setup("fit")
    try:
        loaded = data.tokenizer
    except ValueError:
        # Rows that were converted may have none.
        if Manifest.read(path) is None or tokenizer is not None:
            raise
        loaded = None
    try:
        for batch in islice(data.train_dataloader(), count):
            yield draw(batch, loaded, most=most)
    finally:
        data.teardown("fit")
