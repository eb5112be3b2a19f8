"""Planning: which algorithm, buffer and capacity suit some data, by dry runs over the lengths of its sources.

:func:`plan` reads a sample of a dataset as training would, or takes a list of lengths, packs it with every combination of
algorithm and buffer size as a loader worker does, and recommends one :class:`~lightning_pack.PackingPolicy`. The result is a
:class:`Plan`: a report as text, a table in a notebook, a figure, JSON, and the YAML block for ``lightning-pack fit``.
"""

from lightning_pack.planner.balance import RankBalance, WindowBalance, rank_balance
from lightning_pack.planner.capacities import CapacityChoice
from lightning_pack.planner.combination import Combination
from lightning_pack.planner.dry_run import BUFFER_SIZES, SOURCES, plan
from lightning_pack.planner.recommendation import Recommendation
from lightning_pack.planner.result import Plan
from lightning_pack.planner.sources import Sources
from lightning_pack.planner.stream import LeftOutCount, OverLength, Stream

__all__ = [
    "BUFFER_SIZES",
    "SOURCES",
    "CapacityChoice",
    "Combination",
    "LeftOutCount",
    "OverLength",
    "Plan",
    "RankBalance",
    "Recommendation",
    "Sources",
    "Stream",
    "WindowBalance",
    "plan",
    "rank_balance",
]
