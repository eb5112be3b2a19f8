"""How full the rows of a split are, what was left out of them, and in which files they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from lightning_pack.visible_text import visible

#: Keys that stand for all that were left out for one reason.
_EXAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A tar file of rows."""

    rows: int
    bytes: int
    sha256: str
    #: Sum of the hashes of its sources, hexadecimal.
    digest: str


@dataclass(frozen=True, kw_only=True)
class LeftOutSources:
    """What was left out when the rows were written, for one reason."""

    sources: int
    tokens: int
    #: Keys of the first.
    examples: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class SplitStatistics:
    """The rows of a split.

    Args:
        sources: in rows, pieces counted one by one.
        rows: how many.
        tokens: real ones.
        targets: tokens that the loss counts.
        slots: places for tokens: rows x capacity, or x width where that is fixed.
        alignment: slots that pad sources to the multiple.
        lower_bound: rows that no packing can do without; 0 where rows were decided elsewhere.
        left_out: by reason; of the writing only, and not told again in every epoch.
        shards: by name, in order.
        files: images and the like.
        file_bytes: of them, as they are stored.
        media_tokens: placeholders of them, among the tokens.
    """

    sources: int
    rows: int
    tokens: int
    targets: int
    slots: int
    alignment: int
    lower_bound: int
    left_out: Mapping[str, LeftOutSources] = field(default_factory=dict)
    shards: Mapping[str, Shard] = field(default_factory=dict)
    files: int = 0
    file_bytes: int = 0
    media_tokens: int = 0

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> SplitStatistics:
        """From plain containers."""
        inner = {
            "left_out": {reason: LeftOutSources(**each) for reason, each in state["left_out"].items()},
            "shards": {name: Shard(**each) for name, each in state["shards"].items()},
        }
        # Rows that were written before there were images say nothing of them.
        said = {f.name: state[f.name] for f in fields(cls) if f.name in state or f.default is MISSING}
        return cls(**said | inner)

    @property
    def fill(self) -> float:
        """Real tokens per slot."""
        return self.tokens / self.slots if self.slots else 0.0

    @property
    def tail(self) -> int:
        """Slots that hold neither a real token nor alignment padding."""
        return self.slots - self.tokens - self.alignment

    @property
    def gap(self) -> float:
        """Rows per row of the lower bound, less 1; 0 where there is no bound."""
        return self.rows / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def digest(self) -> int:
        """Of all sources."""
        return sum(int(shard.digest, 16) for shard in self.shards.values()) % (1 << 128)

    def summary(self) -> str:
        """A line or two for people."""
        slots = max(self.slots, 1)
        text = (
            f"{self.sources:,} sources in {self.rows:,} rows, {self.tokens:,} tokens: {self.fill:.2%} full, "
            f"alignment {self.alignment / slots:.2%}, tail {self.tail / slots:.2%}"
        )
        if self.lower_bound:
            text += f", {self.gap:.2%} above the lower bound of {self.lower_bound:,} rows"
        if self.files:
            share = self.media_tokens / max(self.tokens, 1)
            text += f"\n  {self.files:,} images of {self.file_bytes / 2**20:,.1f} MiB, {share:.0%} of the tokens"
        for reason, gone in self.left_out.items():
            examples = ", ".join(map(visible, gone.examples))
            text += f"\n  left out as {reason}: {gone.sources:,} ({gone.tokens:,} tokens), such as {examples}"
        return text


def left_out_by_reason(gone: Sequence[tuple[str, str, int]]) -> dict[str, LeftOutSources]:
    """Counts and examples of ``(key, reason, tokens)``."""
    found = {}
    for reason in sorted({reason for _, reason, _ in gone}):
        those = [(key, tokens) for key, why, tokens in gone if why == reason]
        examples = [key for key, _ in those[:_EXAMPLES]]
        found[reason] = LeftOutSources(sources=len(those), tokens=sum(n for _, n in those), examples=examples)
    return found
