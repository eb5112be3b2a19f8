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
        ValueError: for the address of a store that has to be named by a profile.
    """
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


def is_remote(path: str | Path) -> bool:
    """Whether a path is in an object store.

    >>> is_remote("msc://lake/bucket/chats"), is_remote("data/chats")
    (True, False)
    """
    return location(path).startswith("msc://")
