"""Packers: lengths and a capacity -> groups of indices.

A packer is a plain function ``packer(lengths, capacity, **options)``. Every index comes out exactly once, no group is longer
than the capacity, and the same lengths always give the same groups, on every machine. Groups come in the order in which their
bins were opened, sources in a group in the order in which they were placed. All packers of this package take ``max_sources``:
a bin with so many sources has no room.

| packer | order | rule |
|---|---|---|
| ``concatenative`` | arrival | next fit: the bin is closed when the next source does not fit |
| ``first_fit_decreasing`` | longest first, equal: last first | oldest bin with room |
| ``best_fit_decreasing`` | longest first | fullest bin with room |
| ``first_fit_shuffle`` (seed) | drawn from the seed | oldest bin with room |
| ``modified_first_fit_decreasing`` | longest first | by classes of length |
| ``greedy_knapsack`` | longest first | one bin after the other, the largest that fits |
| ``balanced_greedy_knapsack`` (delta) | longest first | least filled of a fixed number of bins |
| ``minimum_bin_slack`` | longest first | one bin after the other, filled by exact subset sums |

:func:`pack` runs a packer by its name with everything checked, and can ask for more bins. :func:`lower_bound` says how few
bins there can be. :func:`fullest` fills one bin.
"""

from lightning_pack.binning.bin_count import with_bin_count
from lightning_pack.binning.bin_slack import fullest, minimum_bin_slack
from lightning_pack.binning.bound import lower_bound
from lightning_pack.binning.fit import best_fit_decreasing, concatenative, first_fit_decreasing, first_fit_shuffle
from lightning_pack.binning.knapsack import balanced_greedy_knapsack, greedy_knapsack
from lightning_pack.binning.modified import modified_first_fit_decreasing
from lightning_pack.binning.packing import pack
from lightning_pack.binning.registry import Groups, Packer, get_packer, packer_options, packers, register_packer

__all__ = [
    "Groups",
    "Packer",
    "balanced_greedy_knapsack",
    "best_fit_decreasing",
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "fullest",
    "get_packer",
    "greedy_knapsack",
    "lower_bound",
    "minimum_bin_slack",
    "modified_first_fit_decreasing",
    "pack",
    "packer_options",
    "packers",
    "register_packer",
    "with_bin_count",
]
