"""A sample of a dataset as it is: its first sources in the order of the data, with the records that they are made of."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_pack.encoders import Encoder
from lightning_pack.energon.dataset import StreamOptions, open_evaluation_share
from lightning_pack.energon.worker import Whereabouts
from lightning_pack.source import EncodedSource


@dataclass(frozen=True, kw_only=True)
class PlainSample:
    """The first sources of a split.

    Rows say nothing about that: which sources leave a buffer first is a matter of their lengths.

    Args:
        sources: that can be trained on, as the policy admits them: over-long ones are cut or gone already.
        records: of the sources, one after the other.
    """

    sources: list[EncodedSource]
    records: list[Mapping[str, Any]]

    @classmethod
    def read(cls, options: StreamOptions, *, tokens: int) -> PlainSample:
        """The longest beginning of the training split that has at most so many tokens.

        Raises:
            ValueError: if the first source alone has more, or there is none.
        """
        sample = cls(sources=[], records=[])
        count = 0
        for record, sources in _records(options):
            count += sum(map(len, sources))
            if count > tokens:
                break
            if sources:
                sample.records.append(record)
                sample.sources.extend(sources)
        if not sample.sources:
            raise ValueError(f"{options.path!r} has no source to train on within its first {tokens:,} tokens")
        return sample


class _Remembering:
    """An encoder that keeps the record in hand."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.record: Mapping[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)

    def __call__(self, key: str, record: Mapping[str, Any]) -> EncodedSource:
        self.record = record
        return self.encoder(key, record)


def _records(options: StreamOptions) -> Iterator[tuple[Mapping[str, Any], list[EncodedSource]]]:
    """Each record that could be read, and the sources that are trained on: none, one, or the pieces of one."""
    encoder = _Remembering(options.encoder)
    with contextlib.redirect_stdout(io.StringIO()):
        share = open_evaluation_share(replace(options, encoder=encoder), 0, Whereabouts(), split="train", of=1)
    share.worker_config.worker_activate(0)
    record: Mapping[str, Any] | None = None
    found: list[EncodedSource] = []
    try:
        for source in share.dataset:
            if encoder.record is not record and record is not None:
                yield record, found
                found = []
            record = encoder.record
            if len(source):
                found.append(source)
        if record is not None:
            yield record, found
    finally:
        share.worker_config.worker_deactivate()
