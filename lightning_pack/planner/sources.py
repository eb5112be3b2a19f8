"""The sources that a plan is made by: how long they are, and what a capacity makes of those that are longer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_pack.encoders.base import Encoder
from lightning_pack.media_budget import MediaCost
from lightning_pack.planner.stream import LeftOutCount, OverLength, SourceMedia, Stream
from lightning_pack.policy import OverlengthError, PackingPolicy
from lightning_pack.policy_checks import check_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightning_pack.energon import StreamOptions

#: A capacity that no source exceeds, so that all are measured whole.
_UNBOUNDED = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Sources:
    """A sample of a dataset, each source as long as the encoder makes it.

    Args:
        name: of the dataset.
        lengths: real tokens, in the order of reading.
        groups: group keys.
        splittable: whether ``overlength="split"`` may cut a source in pieces.
        left_out: what the encoder left out.
        whole: whether this is one whole pass over the data, and not the beginning of one.
        group_by: field of the records that keeps them apart.
        vision: family of the vision-language model that they are encoded for.
        held: bytes that each holds in the buffer beyond ids and labels; none given means 0 for all, as for lengths alone.
        costs: of the media of each; none given means that there are none.
        shuffled: samples in the shuffle buffer of a loader worker.
        options: with which they were read; None for lengths alone.
    """

    name: str
    lengths: tuple[int, ...] = field(repr=False)
    groups: tuple[str | None, ...] = field(repr=False)
    splittable: tuple[bool, ...] = field(repr=False)
    left_out: tuple[LeftOutCount, ...] = ()
    whole: bool = False
    group_by: str | None = None
    vision: str | None = None
    held: tuple[int, ...] = field(default=(), repr=False)
    costs: tuple[MediaCost, ...] = field(default=(), repr=False)
    shuffled: int = 0
    options: StreamOptions | None = field(default=None, repr=False, compare=False)

    @classmethod
    def given(cls, lengths: Sequence[int], *, most: int) -> Sources:
        """The first of a list of lengths, those of plain texts.

        Raises:
            ValueError: for a length that is no whole number of at least 1, or no lengths at all.
        """
        taken = [int(length) for length in lengths[:most]]
        for index, (length, given) in enumerate(zip(taken, lengths, strict=False)):
            if length < 1 or length != given:
                raise ValueError(f"lengths[{index}] is {given}: a source has a whole number of tokens, at least 1")
        if not taken:
            raise ValueError("there are no lengths to plan with: give at least one")
        count = len(taken)
        return cls(
            name="lengths",
            lengths=tuple(taken),
            groups=(None,) * count,
            splittable=(True,) * count,
            whole=len(lengths) <= most,
        )

    @classmethod
    def read(
        cls,
        path: str | Path,
        *,
        tokenizer: str | Path | PreTrainedTokenizerBase | None,
        encoder: Encoder | None,
        group_by: str | None,
        vision: str | None,
        policy: PackingPolicy,
        most: int,
    ) -> Sources:
        """The first sources of a dataset's training split, shuffled and encoded as for training.

        Raises:
            ValueError: if there is no such dataset, no tokenizer, or no source that can be trained on.
        """
        from lightning_pack.datamodule import EnergonPackDataModule
        from lightning_pack.energon import check_group_field, sample_sources
        from lightning_pack.offline.manifest import Manifest

        if Manifest.read(path) is not None:
            raise ValueError(f"{str(path)!r} holds packed rows, which are decided: plan with the data that they were made from")
        data = EnergonPackDataModule(
            path, tokenizer=tokenizer, packing=PackingPolicy(_UNBOUNDED), encoder=encoder, group_by=group_by, vision=vision
        )
        data.setup("validate")
        check_encoder(policy, data.encoder)
        check_group_field(data.options)
        found = sample_sources(data.options, most=most)
        left_out = tuple(
            LeftOutCount(reason=reason, sources=count)
            for reason, count in sorted(Counter(gone.reason for gone in found.left_out).items())
        )
        if not found.lengths:
            counted = ", ".join(f"{gone.reason} {gone.sources:,}" for gone in left_out)
            raise ValueError(
                f"none of the {len(found.left_out):,} sources read from {data.path!r} can be trained on ({counted}): correct "
                "the data, or give the tokenizer or encoder that it is meant for"
            )
        return cls(
            name=data.path,
            lengths=tuple(found.lengths),
            groups=tuple(found.groups),
            splittable=tuple(found.splittable),
            left_out=left_out,
            whole=found.whole,
            group_by=group_by,
            vision=vision,
            held=tuple(found.held),
            costs=tuple(found.media),
            shuffled=data.shuffle_buffer_size,
            options=data.options,
        )

    def media(self, policy: PackingPolicy) -> SourceMedia | None:
        """Means over the sources that a policy admits; None where no source has media."""
        if not self.has_media:
            return None
        fit = [i for i in range(len(self.lengths)) if self._pieces(i, policy)]
        values = [(self.held[i], *self.costs[i]) for i in fit] or [(0, 0, 0, 0)]
        held, tokens, nbytes, encoded = (sum(column) / len(values) for column in zip(*values, strict=True))
        beyond = sum(self._beyond(i, policy) for i in range(len(self.lengths))) / len(self.lengths)
        return SourceMedia(held=held, tokens=tokens, nbytes=nbytes, encoded=encoded, beyond=beyond, shuffled=self.shuffled)

    @property
    def has_media(self) -> bool:
        """Whether there is an image or the like in any source."""
        return any(cost.tokens for cost in self.costs)

    def stream(self, policy: PackingPolicy, *, count: int) -> Stream:
        """At least ``count`` sources as a policy admits them.

        Fewer sources are repeated in new orders, as the endless training stream does. That a source which is cut may have no
        target left is not known from lengths.

        Raises:
            OverlengthError: under ``overlength="error"``, if a source is longer than the capacity, or its media are more than a
                pack may have.
            ValueError: if none is short enough.
        """
        costs: list[MediaCost] | None = [] if self.has_media else None
        stream = Stream(lengths=[], keys=[], overlength=self.overlength(policy), media=self.media(policy), costs=costs)
        if not self.fit(policy):
            raise self._none_fits(policy)
        number = 0
        while len(stream.lengths) < count:
            order = np.random.default_rng([policy.seed, number]).permutation(len(self.lengths)).tolist()
            for i in order if number else range(len(self.lengths)):
                pieces = self._pieces(i, policy)
                stream.lengths.extend(pieces)
                stream.keys.extend([self.groups[i]] * len(pieces))
                if costs is not None:
                    costs.extend([self.costs[i]] * len(pieces))
                if len(stream.lengths) >= count:
                    break
            number += 1
        return stream

    def fit(self, policy: PackingPolicy) -> bool:
        """Whether a policy admits any of the sources."""
        return any(self._pieces(index, policy) for index in range(len(self.lengths)))

    def overlength(self, policy: PackingPolicy) -> OverLength:
        """What is longer than the capacity of a policy.

        Raises:
            OverlengthError: under ``overlength="error"``, if any source is, or its media are more than a pack may have.
        """
        lengths = np.array(self.lengths, dtype=np.int64)
        over = lengths > policy.capacity
        if policy.overlength == "error" and over.any():
            raise OverlengthError(
                f"{over.sum():,} of {len(lengths):,} sources of {self.name} are longer than capacity={policy.capacity}, the "
                f"longest has {lengths.max():,} tokens, and overlength='error' would stop the run there: raise the capacity, "
                "or choose overlength='drop' or 'truncate' ('split' for plain text)"
            )
        beyond = sum(self._beyond(i, policy) for i in range(len(self.lengths)))
        if policy.overlength == "error" and beyond:
            raise OverlengthError(
                f"the images of {beyond:,} of {len(lengths):,} sources of {self.name} are more than {_limits(policy)} of a "
                "pack, and overlength='error' would stop the run there: raise the limit, make images smaller, or choose "
                "overlength='drop'"
            )
        lost = np.where(over, lengths, 0)
        if policy.overlength == "truncate":
            lost = np.maximum(lengths - policy.capacity, 0)
        elif policy.overlength == "split":
            lost = np.where(self.splittable, 0, lost)
        return OverLength(over=float(over.mean()), lost=float(lost.sum() / lengths.sum()))

    def sufficient(self, policy: PackingPolicy, *, lost: float, step: int) -> int:
        """The least capacity, a multiple of ``step`` tokens, with which at most a share ``lost`` of the tokens is lost."""
        below, enough = 0, -(-max(self.lengths) // step)
        while enough - below > 1:
            middle = (below + enough) // 2
            if self.overlength(replace(policy, capacity=middle * step)).lost <= lost:
                enough = middle
            else:
                below = middle
        return enough * step

    def _pieces(self, index: int, policy: PackingPolicy) -> list[int]:
        """Lengths of what the policy makes of a source."""
        length, capacity = self.lengths[index], policy.capacity
        if self._beyond(index, policy):
            return []
        if length <= capacity:
            return [length]
        if policy.overlength == "truncate":
            return [capacity]
        if policy.overlength == "split" and self.splittable[index]:
            return [min(capacity, length - start) for start in range(0, length - 1, capacity - 1)]
        return []

    def _beyond(self, index: int, policy: PackingPolicy) -> bool:
        """Whether the media of a source are more than a pack may have."""
        return bool(self.costs) and not policy.media_budget.allows(*self.costs[index][:2])

    def _none_fits(self, policy: PackingPolicy) -> ValueError:
        beyond = sum(self._beyond(i, policy) for i in range(len(self.lengths)))
        media = f"; the images of {beyond:,} are more than {_limits(policy)}" if beyond else ""
        way_out = (
            "raise what is too low, or make images smaller"
            if self.has_media
            else "raise the capacity, or choose overlength='truncate'"
        )
        return ValueError(
            f"none of the {len(self.lengths):,} sources of {self.name} fits into capacity={policy.capacity} (the shortest has "
            f"{min(self.lengths):,} tokens{media}): {way_out}"
        )


def _limits(policy: PackingPolicy) -> str:
    given = (("max_media_tokens", policy.max_media_tokens), ("max_media_bytes", policy.max_media_bytes))
    return " or ".join(f"{name}={value}" for name, value in given if value is not None)
