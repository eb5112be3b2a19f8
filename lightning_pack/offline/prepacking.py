"""Packing ahead: encode once, pack all lengths at once, write the rows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_pack.encoders import Encoder, RecordEncoder, VisionChatEncoder, load_tokenizer
from lightning_pack.energon.dataset import StreamOptions, _leaves, has_split, refuse_endless
from lightning_pack.energon.fingerprint import data_fingerprint, library_fingerprint
from lightning_pack.energon.reading import OnDamaged
from lightning_pack.energon.sampling import check_group_field
from lightning_pack.energon.storage import local_folder
from lightning_pack.location import is_remote, location
from lightning_pack.media import MediaStore
from lightning_pack.offline.manifest import DECIDE_MEDIA_ROWS, DECIDE_ROWS, Manifest, global_policy
from lightning_pack.offline.processes import run_tasks
from lightning_pack.offline.row_writer import PackedSources, is_written
from lightning_pack.offline.source_encoding import encode_part
from lightning_pack.offline.source_store import Part, SourceStore, number_of_parts
from lightning_pack.offline.verification import verify
from lightning_pack.offline.workplace import RESUMED, Workplace, check_destination, refuse_other
from lightning_pack.overlength import Overlength
from lightning_pack.policy_checks import check_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPLITS = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """A complete folder of packed rows."""

    path: Path
    manifest: Manifest
    #: Whether this call wrote it; False where it was there already, and was verified.
    fresh: bool

    def summary(self) -> str:
        """A few lines for people."""
        how = "written" if self.fresh else "already written with these settings, and verified"
        return f"{how}: {self.path}\n{self.manifest.summary()}"


def prepack(
    data: str | Path,
    out: str | Path,
    *,
    capacity: int,
    algorithm: str = "minimum_bin_slack",
    multiple: int = 1,
    width: str | int = "variable",
    overlength: Overlength = "drop",
    max_sources: int | None = None,
    fixed_boundaries: bool = False,
    min_bins: int | None = None,
    bins_multiple_of: int = 1,
    delta: int = 0,
    max_media_tokens: int | None = None,
    max_media_bytes: int | None = None,
    seed: int = 0,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    vision: str | None = None,
    encoder: Encoder | None = None,
    group_by: str | None = None,
    splits: Sequence[str] | None = None,
    workers: int = 2,
    shards: int | None = None,
    on_damaged: OnDamaged = "error",
    overwrite: bool = False,
    progress: bool = False,
) -> PackedRows:
    """Encode a dataset once, pack all its sources at once, and write the rows as an Energon dataset with a manifest.

    A run that was ended goes on where it was when it is started again with the same settings.

    Rows of chats with images (``vision``, or an encoder with media) hold the image files, which are processed when a row is
    read. Each image is processed once here too, on trial, so that one which breaks leaves its chat out now.

    Args:
        data: dataset as :class:`~lightning_pack.EnergonPackDataModule` takes it. Each source is read once.
        out: folder for the rows, on a local disk; absent or empty, or such rows.
        capacity: most tokens of a row, alignment included.
        algorithm: as in :class:`~lightning_pack.PackingPolicy`; ``"auto"`` is ``"minimum_bin_slack"`` here.
        multiple: likewise, and so are the settings down to ``seed``, which also draws the order of the rows.
        width: of the rows.
        overlength: what happens to a longer source.
        max_sources: of a row.
        fixed_boundaries: whether rows have as many boundaries each.
        min_bins: least number of rows of each split.
        bins_multiple_of: what the number of rows of each split is a multiple of.
        delta: for ``"balanced_greedy_knapsack"``.
        max_media_tokens: most placeholders of images in a row; a source with more is left out as ``media_budget``.
        max_media_bytes: most bytes of the tensors that a row's images become.
        seed: of the algorithm, and of the order of the rows.
        tokenizer: as for the datamodule; None takes the folder ``tokenizer`` inside ``data``.
        vision: as for the datamodule: family of the vision-language model that chats with images are for.
        encoder: as for the datamodule; one with media must be a :class:`~lightning_pack.media.MediaStore`.
        group_by: as for the datamodule.
        splits: to write; None takes those of ``train``, ``val`` and ``test`` that there are.
        workers: processes that encode and write; 0 works in this one.
        shards: of each split; None takes as many as are convenient.
        on_damaged: as for the datamodule.
        overwrite: whether to replace rows of other settings.
        progress: show a progress bar where stderr is a terminal.

    Raises:
        ValueError: for settings that do not fit together, data that cannot be opened, rows of other settings at ``out``, naming
            each difference, or no source that can be trained on.
        VerificationError: if the rows are there already and are damaged.
    """
    if is_remote(out):
        raise ValueError(f"{location(out)!r} is in an object store: write the rows to a local folder, and copy that")
    for name, value, least in (("workers", workers, 0), ("shards", 1 if shards is None else shards, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: a whole number of at least {least} is needed")
    policy = global_policy(
        capacity=capacity,
        algorithm="minimum_bin_slack" if algorithm == "auto" else algorithm,
        multiple=multiple,
        width=width,
        overlength=overlength,
        max_sources=max_sources,
        fixed_boundaries=fixed_boundaries,
        min_bins=min_bins,
        bins_multiple_of=bins_multiple_of,
        delta=delta,
        max_media_tokens=max_media_tokens,
        max_media_bytes=max_media_bytes,
        seed=seed,
    )
    # A tokenizer's threads must not have been used before processes are forked.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    source, out = location(data), Path(out).resolve()
    if not is_remote(source) and not Path(source).exists():
        raise ValueError(f"there is no dataset at {source!r}: correct the path, or make one with 'lightning-pack prepare'")
    encoder = _encoder(source, tokenizer=tokenizer, vision=vision, encoder=encoder, group_by=group_by)
    check_encoder(policy, encoder)
    media = bool(getattr(encoder, "has_media", False))
    if media and not isinstance(encoder, MediaStore):
        raise ValueError(
            f"{type(encoder).__name__} gives images or the like, and rows that are written ahead hold them as files: give it "
            "the methods files_of and with_files of lightning_pack.media.MediaStore, or pack while training (fit on the "
            "dataset itself)"
        )
    options = StreamOptions(path=source, encoder=encoder, policy=policy, on_damaged=on_damaged)
    counts = {split: _samples(source, split) for split in _chosen(source, splits)}
    manifest = Manifest(
        origin=RESUMED,
        packing={name: getattr(policy, name) for name in (*DECIDE_ROWS, *(DECIDE_MEDIA_ROWS if media else ()))},
        encoder=encoder.fingerprint(),
        data={split: data_fingerprint(source, split=split, missing_ok=on_damaged == "skip") for split in counts},
        versions=library_fingerprint(),
        pad_id=encoder.pad_id,
        splits={},
        media=media,
    )
    place = Workplace(out)
    with place.held():
        found = check_destination(out, overwrite=overwrite)
        if found is not None:
            refuse_other(out, found, manifest.settings())
            # Of a run that was killed at its very end.
            place.clear()
            return PackedRows(path=out, manifest=verify(out, progress=progress).manifest, fresh=False)
        for split in counts:
            check_group_field(options, split=split)
        begun = manifest.settings() | dict(manifest.versions) | {"shards": shards, "on_damaged": on_damaged}
        place.begin(begun, overwrite=overwrite)
        written = {}
        for split, samples in counts.items():
            parts = [Part(place.folder, split, i, of) for of in [number_of_parts(samples)] for i in range(of)]
            missing = [part for part in parts if not part.is_complete()]
            run_tasks(f"encoding {split}", lambda part: encode_part(part, options), missing, workers=workers, progress=progress)
            store = SourceStore.of(parts)
            if not len(store):
                # There is nothing to go on with: other data or settings begin anew.
                place.clear()
                raise _useless(store, source, split)
            packed = PackedSources.of(store, policy, split=split, media=media)
            names = packed.shards(shards)
            todo = [each for each in names if not is_written(place.dataset, each[0])]
            run_tasks(
                f"writing {split}",
                lambda each, packed=packed: packed.write(place.dataset, *each),  # type: ignore[misc]
                todo,
                workers=workers,
                progress=progress,
            )
            written[split] = packed.statistics(place.dataset, [name for name, _ in names])
        manifest = replace(manifest, splits=written)
        _keep_tokenizer(encoder, place.dataset)
        place.publish(manifest, [name for split in written.values() for name in split.shards], overwrite=overwrite)
    return PackedRows(path=out, manifest=manifest, fresh=True)


def _encoder(source: str, *, tokenizer: Any, vision: str | None, encoder: Encoder | None, group_by: str | None) -> Encoder:
    if vision is not None and (encoder is not None or not isinstance(tokenizer, str | Path | None)):
        raise ValueError(
            f"vision={vision!r} makes an encoder from the folder of a tokenizer and an image processor: give that folder as "
            "tokenizer, or an encoder of your own and no vision"
        )
    if encoder is None:
        given = f"{source.rstrip('/')}/tokenizer" if tokenizer is None else tokenizer
        if vision is not None:
            return VisionChatEncoder(local_folder(given), family=vision, group_by=group_by)
        loaded = load_tokenizer(local_folder(given)) if isinstance(given, str | Path) else given
        return RecordEncoder(loaded, group_by=group_by)
    if tokenizer is not None:
        raise ValueError("an encoder brings its own tokenizer: give one of encoder and tokenizer, not both")
    if group_by is not None:
        raise ValueError(f"group_by={group_by!r} is for the default encoder: let yours set EncodedSource.group")
    return encoder


def _chosen(source: str, splits: Sequence[str] | None) -> list[str]:
    if Manifest.read(source) is not None:
        raise ValueError(f"{source!r} holds packed rows already: give the dataset that they were made from")
    for split in splits or ():
        if split not in _SPLITS:
            raise ValueError(f"{split!r} is no split: they are {', '.join(_SPLITS)}")
    found = [split for split in _SPLITS if has_split(source, split)]
    missing = [split for split in splits or () if split not in found]
    if missing or not found:
        raise ValueError(
            f"the dataset {source!r} has no samples in its split {', '.join(map(repr, missing or _SPLITS[:1]))}; it has "
            f"{', '.join(found) or 'none'}"
        )
    return [split for split in found if splits is None or split in splits]


def _samples(source: str, split: str) -> int:
    """Samples of a split, of which each is to be read once."""
    refuse_endless(source, split)
    leaves, _ = _leaves(source, split)
    repeated = [leaf for leaf in leaves if leaf.repetitions not in (None, 1)]
    if repeated:
        raise ValueError(
            f"{source!r} repeats a dataset {repeated[0].repetitions:g} times, and rows hold every source exactly once: write "
            "each dataset's rows by themselves"
        )
    return sum(len(leaf.dataset) for leaf in leaves)


def _useless(store: SourceStore, source: str, split: str) -> ValueError:
    listed = ", ".join(f"{gone.key} ({gone.reason})" for gone in store.left_out[:3])
    return ValueError(f"no source of the split {split!r} of {source!r} can be trained on; left out are {listed or 'none'}")


def _keep_tokenizer(encoder: Encoder, folder: Path) -> None:
    """So that whoever trains on the rows has the tokenizer that made them, and the image processor."""
    shutil.rmtree(folder / "tokenizer", ignore_errors=True)
    for part in (getattr(encoder, "tokenizer", None), getattr(encoder, "image_processor", None)):
        if part is not None:
            part.save_pretrained(str(folder / "tokenizer"))
