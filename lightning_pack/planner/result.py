"""Plan: everything that was measured, and what to do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_pack.planner.balance import RankBalance
from lightning_pack.planner.capacities import CapacityChoice
from lightning_pack.planner.combination import Combination
from lightning_pack.planner.memory import MeasuredMemory
from lightning_pack.planner.recommendation import Recommendation
from lightning_pack.planner.sources import Sources
from lightning_pack.policy import PackingPolicy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """What :func:`lightning_pack.plan` found. ``print(plan)`` shows the report, a notebook shows tables.

    Args:
        sources: the sample of the data.
        workers: loader workers of a rank.
        ranks: data-parallel ranks.
        combinations: every algorithm with every buffer size, at the capacity asked for.
        capacities: other capacities, at equal slots per step.
        balance: how unequal the work of ranks is under the recommended algorithm and buffer; None for one rank.
        recommendation: what to take, and why.
        memory: of a loader worker that was run so; None where none was.
    """

    sources: Sources
    workers: int
    ranks: int
    combinations: tuple[Combination, ...]
    capacities: tuple[CapacityChoice, ...]
    balance: RankBalance | None
    recommendation: Recommendation
    memory: MeasuredMemory | None = None

    def __repr__(self) -> str:
        return f"Plan({self.sources.name!r}, {len(self.combinations)} combinations, recommended={self.policy!r})"

    @property
    def policy(self) -> PackingPolicy:
        """The recommended packing rules."""
        return self.recommendation.policy

    def report(self) -> str:
        """All of it as text, without the YAML block."""
        from lightning_pack.planner.report import text

        return text(self)

    def yaml(self) -> str:
        """The recommended policy as a configuration of ``lightning-pack fit``: paste it, or give it as another ``--config``."""
        from lightning_pack.planner.settings import block

        return block(self)

    def to_json(self) -> str:
        """Everything but the single lengths, as JSON text."""
        from lightning_pack.planner.settings import document

        return json.dumps(document(self), indent=2)

    def figure(self) -> Figure:
        """Two charts: the lengths of the sources with the capacity, and fill by buffer size.

        Raises:
            MissingPlotError: without matplotlib, which ``pip install 'lightning-pack[plot]'`` brings.
        """
        from lightning_pack.planner.picture import drawn

        return drawn(self)

    def __str__(self) -> str:
        return self.report()

    def _repr_html_(self) -> str:
        from lightning_pack.planner.report import html

        return html(self)
