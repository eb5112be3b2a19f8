"""What the settings of a policy must be: each in its range, all of them fitting together, and none without use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_pack import binning

if TYPE_CHECKING:
    from lightning_pack.policy import PackingPolicy

#: Settings that limit media.
MEDIA_LIMITS = ("max_media_tokens", "max_media_bytes", "buffer_media_tokens", "buffer_media_bytes")
#: What ``cu_seqlens`` can count, being int32.
_MOST_TOKENS = 2**31 - 1
_WHOLE_BUFFER = "carry_over=False, which packs a buffer as a whole"


def check_settings(policy: PackingPolicy) -> None:
    """Check a policy as it is made.

    Raises:
        ValueError: naming the setting, its value, its limit and the ways out.
    """
    _check_ranges(policy)
    if policy.algorithm not in (known := ["auto", *binning.packers()]):
        raise ValueError(f"algorithm {policy.algorithm!r} is not known; known are {', '.join(known)}")
    if policy.capacity % policy.multiple:
        raise ValueError(
            f"capacity={policy.capacity} is not a multiple of multiple={policy.multiple}: "
            f"take {policy.capacity // policy.multiple * policy.multiple or policy.multiple}"
        )
    if policy.overlength == "split" and policy.capacity < 2:
        raise ValueError("overlength='split' needs a capacity of at least 2 tokens: each piece repeats one as context")
    _check_width(policy)
    _check_use(policy)
    if (policy.min_bins or 1) > policy.buffer_size:
        raise ValueError(
            f"min_bins={policy.min_bins} packs cannot be made of buffer_size={policy.buffer_size} sources: raise buffer_size"
        )
    if policy.buffer_size % policy.bins_multiple_of:
        # Else so many packs might be needed that some would have no source.
        raise ValueError(
            f"buffer_size={policy.buffer_size} must be a multiple of bins_multiple_of={policy.bins_multiple_of}: "
            f"take {-(-policy.buffer_size // policy.bins_multiple_of) * policy.bins_multiple_of}"
        )
    # Refuses options that the packer does not take.
    binning.pack([], policy.capacity, algorithm=policy.packer, **policy.packer_settings)


def _check_ranges(policy: PackingPolicy) -> None:
    for name, least in (
        *(("capacity", 1), ("buffer_size", 1), ("multiple", 1), ("max_sources", 1), ("min_bins", 1)),
        *(("bins_multiple_of", 1), ("delta", 0), ("window", 2), ("seed", 0)),
        *((name, 1) for name in MEDIA_LIMITS),
    ):
        value = getattr(policy, name)
        if value is None and name in ("max_sources", "min_bins", "window", *MEDIA_LIMITS):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: a whole number of at least {least} is needed")
    for name in ("capacity", "width"):
        tokens = getattr(policy, name)
        if isinstance(tokens, int) and tokens > _MOST_TOKENS:
            raise ValueError(f"{name}={tokens}: a row has at most {_MOST_TOKENS} tokens, as cu_seqlens counts them in int32")
    limit = policy.age_limit
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not 2 <= limit < float("inf")):
        raise ValueError(f"age_limit={limit!r}: a number of turnovers of at least 2 is needed")
    for name in ("carry_over", "fixed_boundaries"):
        if not isinstance(getattr(policy, name), bool):
            raise ValueError(f"{name}={getattr(policy, name)!r} is not True or False")
    if policy.balance not in (None, "quadratic"):
        raise ValueError(f"balance={policy.balance!r} is not 'quadratic' or None")
    if policy.overlength not in ("drop", "truncate", "split", "error"):
        raise ValueError(f"overlength={policy.overlength!r} is not one of 'drop', 'truncate', 'split', 'error'")


def _check_width(policy: PackingPolicy) -> None:
    width = policy.width
    if width in ("variable", "fixed"):
        return
    if isinstance(width, bool) or not isinstance(width, int):
        raise ValueError(f"width={width!r} is not 'variable', 'fixed' or a number of tokens")
    if width % policy.multiple:
        raise ValueError(f"width={width} is not a multiple of multiple={policy.multiple}")
    if width < policy.capacity:
        raise ValueError(f"width={width} is less than capacity={policy.capacity}: a full pack would not fit its row")


def _check_use(policy: PackingPolicy) -> None:
    for name, used, where in (
        ("age_limit", policy.carry_over, "carry_over=True"),
        ("min_bins", not policy.carry_over, _WHOLE_BUFFER),
        ("bins_multiple_of", not policy.carry_over, _WHOLE_BUFFER),
        ("window", policy.balance is not None, "balance='quadratic'"),
    ):
        value = getattr(policy, name)
        if value is not None and not used and (name, value) != ("bins_multiple_of", 1):
            raise ValueError(f"{name}={value!r} is used with {where} only")
    for name in ("max_media_tokens", "max_media_bytes"):
        if getattr(policy, name) is not None and (policy.min_bins, policy.bins_multiple_of) != (None, 1):
            raise ValueError(
                f"{name}={getattr(policy, name)} makes more packs of some, which min_bins={policy.min_bins} and "
                f"bins_multiple_of={policy.bins_multiple_of} count: leave out the one or the other"
            )
    if policy.fixed_boundaries and (policy.row_width is None or policy.max_sources is None):
        raise ValueError(
            f"fixed_boundaries=True with width={policy.width!r} and max_sources={policy.max_sources}: rows of one shape need a "
            "fixed width (width='fixed') and the most sources of a pack (max_sources); set both, or leave fixed_boundaries out"
        )
    if policy.algorithm == "concatenative":
        if policy.seed:
            raise ValueError(f"seed={policy.seed} is not used by algorithm='concatenative', which keeps the order of arrival")
        if policy.balance is not None:
            raise ValueError(f"balance={policy.balance!r} changes the order of arrival, which algorithm='concatenative' keeps")


def check_encoder(policy: PackingPolicy, encoder: Any) -> None:
    """Check that the settings are of use with an encoder, and do not ask for what it cannot do.

    Raises:
        ValueError: for limits of media where there are none, and rules that would cut sources with media.
    """
    if getattr(encoder, "has_media", False):
        if policy.overlength in ("truncate", "split"):
            raise ValueError(
                f"overlength={policy.overlength!r} would cut sources, and one with images is never cut, since placeholders and "
                "pixels would not match any more: choose overlength='drop' or 'error'"
            )
        return
    for name in MEDIA_LIMITS:
        if getattr(policy, name) is not None:
            raise ValueError(
                f"{name}={getattr(policy, name)} limits images and the like, which {type(encoder).__name__} does not give: "
                "leave it out, or take an encoder with media, such as VisionChatEncoder"
            )


def refuse_media(encoder: Any, what: str) -> None:
    """Check that an encoder gives tokens alone.

    Raises:
        ValueError: for one with media, naming ``what`` cannot take them.
    """
    if getattr(encoder, "has_media", False):
        raise ValueError(
            f"{what} hold tokens and no images, and {type(encoder).__name__} gives images: pack while training (fit on the "
            "dataset itself), or write rows from the dataset ('lightning-pack prepack')"
        )
