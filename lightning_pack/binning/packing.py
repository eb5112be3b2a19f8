"""One call that packs and checks everything: lengths, options, what an own packer gives, the number of bins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_pack.binning.bin_count import with_bin_count
from lightning_pack.binning.limits import fitting, most_sources
from lightning_pack.binning.registry import Groups, get_packer, packer_options, packers


def pack(
    lengths: Sequence[int],
    capacity: int,
    *,
    algorithm: str,
    min_bins: int | None = None,
    bins_multiple_of: int = 1,
    **options: Any,
) -> Groups:
    """Pack sources into bins with a registered packer.

    >>> pack([6, 5, 4, 3, 2], 10, algorithm="best_fit_decreasing", bins_multiple_of=3)
    [[0], [1, 2], [3, 4]]

    Args:
        lengths: of the sources, in tokens.
        capacity: most tokens in a bin.
        algorithm: name of the packer.
        min_bins: fewest bins; None for no such limit.
        bins_multiple_of: what the number of bins must be a multiple of.
        options: what the packer takes, see :func:`packer_options`. ``max_sources=None``, no limit, goes with any packer.

    Returns:
        Groups of indices into ``lengths``: every index once, no group empty or over the limits. Without sources there are no
        groups, unless ``min_bins`` asks for some.

    Raises:
        ValueError: for lengths, options or limits that cannot be met, and for a packer that breaks these promises.
    """
    packer = get_packer(algorithm)
    max_sources = options.get("max_sources")
    if max_sources is None:
        options.pop("max_sources", None)
    taken = packer_options(algorithm)
    for name, value in options.items():
        if name not in taken:
            others = [other for other in packers() if name in packer_options(other)]
            raise ValueError(
                f"{name}={value!r} is not used by algorithm={algorithm!r}, which takes "
                f"{', '.join(sorted(taken)) or 'no options'}; {name} is taken by {', '.join(others) or 'no packer'}"
            )
    most = most_sources(max_sources)
    values = fitting(lengths, capacity)
    # The packers of this package are held to their promises by their tests.
    if packer.__module__.startswith(f"{__package__}."):
        groups = packer(values, capacity, **options)
    else:
        try:
            found = list(packer(values, capacity, **options))
        except Exception as e:
            raise ValueError(
                f"packer {algorithm!r} failed for {len(values)} lengths and capacity={capacity} ({type(e).__name__}: {e}): it "
                "must give a list of groups of indices, for any lengths, none included"
            ) from e
        groups = _checked(algorithm, found, values, capacity, most)
    return with_bin_count(groups, values, min_bins=min_bins, bins_multiple_of=bins_multiple_of, max_sources=max_sources)


def _checked(algorithm: str, groups: Any, lengths: list[int], capacity: int, most: int) -> Groups:
    packer = f"packer {algorithm!r}"
    seen = [False] * len(lengths)
    checked: Groups = []
    for number, group in enumerate(groups):
        indices = [int(index) for index in group]
        if not indices:
            raise ValueError(f"{packer} gave bin {number} without a source")
        for index in indices:
            if not 0 <= index < len(lengths):
                raise ValueError(f"{packer} gave index {index} in bin {number}, where there are {len(lengths)} sources")
            if seen[index]:
                raise ValueError(f"{packer} gave index {index} twice, the second time in bin {number}")
            seen[index] = True
        load = sum(lengths[index] for index in indices)
        if load > capacity:
            raise ValueError(f"{packer} gave bin {number} {load} tokens, indices {indices}: more than capacity={capacity}")
        if len(indices) > most:
            raise ValueError(
                f"{packer} gave bin {number} {len(indices)} sources, indices {indices}: more than max_sources={most}"
            )
        checked.append(indices)
    if not all(seen):
        raise ValueError(f"{packer} left out index {seen.index(False)}: every source must be in a bin")
    return checked
