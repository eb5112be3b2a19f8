"""What a run says about its rows, beside what the manifest says: nothing is re-packed, and nothing is ignored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from lightning_pack.encoders import Encoder, tokenizer_fingerprint
from lightning_pack.encoders.image_processor import image_processor_fingerprint
from lightning_pack.flat_settings import flat
from lightning_pack.offline.manifest import DECIDE_MEDIA_ROWS, DECIDE_ROWS, Manifest, ManifestError
from lightning_pack.offline.replay import ReplayPolicy
from lightning_pack.policy import PackingPolicy

#: Of a datamodule that is given no policy.
DEFAULT_CAPACITY = 2048
#: Settings of a policy that hold for rows too: they only decide the order.
_ORDER = ("balance", "window")


def replayed(
    path: str,
    manifest: Manifest,
    *,
    packing: PackingPolicy,
    given: Collection[str],
    multiple: int,
    encoder: Encoder | None,
    tokenizer: Any,
    group_by: str | None,
    packs_per_batch: int,
    vision: str | None = None,
    image_processor: Any = None,
) -> ReplayPolicy:
    """The policy that gives rows as they are, where all that is given agrees with how they were made.

    Args:
        path: of the rows, for errors.
        manifest: theirs.
        packing: the policy that the run has.
        given: settings of it that were given, also where they have their default; the others say nothing.
        multiple: that the parallel layout asks for.
        encoder: that is given.
        tokenizer: that is given, loaded.
        group_by: that is given.
        packs_per_batch: packs in a row.
        vision: family that is given.
        image_processor: that rows with images are to be read with, where no encoder is given.

    Raises:
        ManifestError: naming each setting that differs, with both values.
    """
    lines = _packing(manifest, packing, given)
    if manifest.packing["multiple"] % multiple:
        lines.append(f"  packing.multiple: {manifest.packing['multiple']} in the rows, {multiple} is what parallel needs")
    if packs_per_batch != 1:
        lines.append(f"  packs_per_batch: 1 in the rows, {packs_per_batch} now (a row is a micro-batch as it is)")
    now: dict[str, Any] = {}
    if encoder is not None:
        now = flat({"encoder": encoder.fingerprint()})
    elif tokenizer is not None:
        now = flat({"encoder": {"tokenizer": tokenizer_fingerprint(tokenizer)}})
    then = flat({"encoder": manifest.encoder})
    if group_by is not None:
        now["encoder.group_by"] = group_by
    if vision is not None:
        now["encoder.family"] = vision
    if image_processor is not None:
        now |= flat({"encoder": {"image_processor": image_processor_fingerprint(image_processor)}})
    if now and not then:
        lines.append("  encoder: not known for these rows, which were converted; leave tokenizer and encoder out")
        now = {}
    names = [*now, *(name for name in then if encoder is not None and name not in now)]
    for name in names:
        old, new = then.get(name, "not set"), now.get(name, "not set")
        if _plain(old) != _plain(new):
            lines.append(f"  {name}: {old!r} in the rows, {new!r} now")
    if lines:
        raise ManifestError(
            f"the rows in {path!r} were made with other settings:\n" + "\n".join(lines) + "\nRows are not packed or tokenized "
            "again: leave these settings out of the configuration (see configs/packed_rows.yaml), or write rows with them "
            "('lightning-pack prepack')"
        )
    order = {name: getattr(packing, name) for name in _ORDER}
    return ReplayPolicy.of(manifest, **order)


def refuse_other_tokens(path: str, encoder: Mapping[str, Any], val_path: str, val_encoder: Mapping[str, Any]) -> None:
    """Make sure that the rows for training and those for validation consist of the same tokens, where that is known of both.

    Raises:
        ManifestError: naming each setting that differs, with both values.
    """
    here, there = flat({"encoder": encoder}), flat({"encoder": val_encoder})
    names = [name for name in dict.fromkeys([*here, *there]) if here.get(name) != there.get(name)]
    if here and there and names:
        lines = [f"  {name}: {here.get(name, 'not set')!r} and {there.get(name, 'not set')!r}" for name in names]
        raise ManifestError(
            f"the rows in {path!r} and those in val_path={val_path!r} were made with different tokenizers or encoders:\n"
            + "\n".join(lines)
            + "\nWrite both with the same ('lightning-pack prepack')"
        )


def given_settings(packing: PackingPolicy) -> frozenset[str]:
    """Settings of a policy that somebody chose.

    A policy that was given all of them comes from a parser or ``dataclasses.replace``, which fill in defaults: those that have
    their default say nothing then, and neither does the capacity where all of them have.
    """
    defaults = {f.name: f.default for f in fields(packing)}
    if packing.given != defaults.keys():
        return packing.given
    chosen = frozenset(name for name, default in defaults.items() if name != "capacity" and getattr(packing, name) != default)
    return chosen | {"capacity"} if chosen or packing.capacity != DEFAULT_CAPACITY else chosen


def _packing(manifest: Manifest, packing: PackingPolicy, given: Collection[str]) -> list[str]:
    lines = []
    for setting in fields(PackingPolicy):
        name, value = setting.name, getattr(packing, setting.name)
        if name in _ORDER or name not in given:
            continue
        if name in DECIDE_MEDIA_ROWS and not manifest.media:
            lines.append(f"  packing.{name}: not used with rows of tokens alone, {value!r} now")
        elif name not in (*DECIDE_ROWS, *DECIDE_MEDIA_ROWS):
            lines.append(f"  packing.{name}: not used with rows that are decided, {value!r} now")
        elif name not in manifest.packing:
            lines.append(f"  packing.{name}: not known for these rows, which were converted, {value!r} now")
        elif (packing.packer if name == "algorithm" else value) != manifest.packing[name]:
            # Rows that are written under "auto" are those of its packer.
            lines.append(f"  packing.{name}: {manifest.packing[name]!r} in the rows, {value!r} now")
    return lines


def _plain(value: Any) -> Any:
    """As it is after a JSON file."""
    return list(value) if isinstance(value, tuple) else value
