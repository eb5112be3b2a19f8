"""Where data lies: in a folder, or in an object store that is named ``msc://PROFILE/...``."""

from __future__ import annotations

from pathlib import Path

#: What Energon's paths know beside local folders; a bucket's own address is not among them.
_PROTOCOLS = ("msc", "file", "dss", "rclone")


def location(path: str | Path) -> str:
    """A path as text, with the two slashes of ``msc://`` that :class:`pathlib.Path` takes for one.

    >>> location(Path("msc://lake/bucket/chats"))
    'msc://lake/bucket/chats'

    Raises:
        ValueError: for what is no path, or the address of a store that has to be named by a profile.
    """
    if not isinstance(path, str | Path):
        raise ValueError(f"path={path!r}: a path is needed, as text or a pathlib.Path")
    text = str(path)
    if text.startswith("msc:/") and not text.startswith("msc://"):
        text = text.replace("msc:/", "msc://", 1)
    protocol, _, rest = text.partition("://")
    if rest and protocol not in _PROTOCOLS:
        raise ValueError(
            f"{text!r} cannot be opened: name an object store as msc://PROFILE/..., where PROFILE is one of the multi-storage "
            "client's configuration (the file that MSC_CONFIG names, or ~/.msc_config.yaml)"
        )
    return text


def require_dataset(path: str) -> None:
    """Check that a local path may be a dataset, before anything is read of it.

    Raises:
        ValueError: for a path at which there is nothing, or something else.
    """
    if "://" in path:
        return
    place = Path(path)
    if not place.exists():
        raise ValueError(
            f"there is no dataset at {path!r}. Correct the path, or make one with "
            "'lightning-pack prepare FILE.jsonl OUT --tokenizer DIR' or 'energon prepare'"
        )
    if place.is_file() and place.suffix not in (".jsonl", ".yaml", ".yml"):
        raise ValueError(
            f"{path!r} is a file that is no dataset: give the folder that 'lightning-pack prepare' or 'energon prepare' wrote, "
            "a .jsonl file that 'energon prepare' has indexed, or a metadataset .yaml"
        )
    if place.suffix == ".jsonl" and not Path(f"{path}.idx").exists():
        raise ValueError(
            f"{path!r} has no index ({place.name}.idx), by which Energon reads it: 'energon prepare {path}' writes it, "
            f"or make a dataset with a validation split with 'lightning-pack prepare {path} OUT --tokenizer DIR'"
        )
    if place.is_dir() and not (place / ".nv-meta").is_dir():
        inside = sorted(str(each) for each in place.iterdir() if (each / ".nv-meta").is_dir())
        others = f"; in it are the datasets {', '.join(inside[:5])}" if inside else ""
        raise ValueError(
            f"{path!r} is a folder that holds no dataset (no .nv-meta){others}. Make one with 'lightning-pack prepare "
            "FILE.jsonl OUT --tokenizer DIR' or 'energon prepare'"
        )


def require_own_tokenizer(path: str) -> None:
    """Check that data to which no tokenizer was given may bring its own.

    Raises:
        ValueError: for a file, and for a folder that 'energon prepare' wrote.
    """
    if "://" in path or (Path(path) / "tokenizer").is_dir():
        return
    way_out = "give the folder of one that tokenizer.save_pretrained() wrote (--data.tokenizer DIR, tokenizer=DIR)"
    if path.endswith(".jsonl"):
        way_out += ", or let 'lightning-pack prepare FILE.jsonl OUT --tokenizer DIR' make a dataset that has one"
    raise ValueError(f"{path!r} brings no tokenizer along (a folder 'tokenizer'): {way_out}")


def is_remote(path: str | Path) -> bool:
    """Whether a path is in an object store.

    >>> is_remote("msc://lake/bucket/chats"), is_remote("data/chats")
    (True, False)
    """
    return location(path).startswith("msc://")
