"""Packed chat rows of NeMo-RL and Megatron-LM: a line of JSON is a row, its ``messages`` are several conversations in a list.

As Megatron-LM's ``SFTDataset`` has it, a conversation begins at each message of the role ``system``; what comes before the
first is one too. The text is not tokenized yet, so an encoder is needed, and what it makes of a row may be longer than the
capacity.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_pack.encoders import Encoder, LeaveOut
from lightning_pack.offline.given_row import GivenRow, GivenRowError, GivenSource, attempted
from lightning_pack.overlength import admitted, too_long
from lightning_pack.policy import PackingPolicy
from lightning_pack.source import IGNORE, EncodedSource, LeftOut


def conversations(messages: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The conversations of a row.

    >>> [len(each) for each in conversations([{"role": r} for r in ("system", "user", "assistant", "system", "user")])]
    [3, 2]
    """
    found: list[list[Mapping[str, Any]]] = []
    for message in messages:
        if not found or message.get("role") == "system":
            found.append([])
        found[-1].append(message)
    return found


def read_chat_rows(path: Path, *, encoder: Encoder, policy: PackingPolicy, skip: bool) -> Iterator[GivenRow | GivenRowError]:
    """The rows of a file, or what is wrong with each.

    Args:
        path: of the file.
        encoder: of each conversation.
        policy: its ``capacity``, ``multiple`` and ``overlength`` hold: a conversation for which its row has no room is left
            out, cut (``"truncate"``), or an error.
        skip: whether a conversation that the encoder does not understand is left out of its row and counted as ``corrupt``;
            else its row is an error. One without targets is left out and counted in any case.

    Raises:
        OverlengthError: under ``overlength="error"``.
    """
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path.name}[{number}]"
            yield attempted(partial(_row, place, line, encoder=encoder, policy=policy, skip=skip), place)


def _row(place: str, line: str, *, encoder: Encoder, policy: PackingPolicy, skip: bool) -> GivenRow:
    try:
        record = json.loads(line)
    except ValueError as e:
        raise GivenRowError(f"{place}: the line is no JSON ({e})") from e
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise GivenRowError(f'{place}: a row is {{"messages": [...]}} with the messages of its conversations')
    sources: list[GivenSource] = []
    gone: list[LeftOut] = []
    used = 0
    for i, conversation in enumerate(conversations(messages)):
        key = f"{place}#{i}"
        try:
            source = encoder(key, {"messages": conversation})
        except LeaveOut as e:
            if e.reason == "corrupt" and not skip:
                raise GivenRowError(
                    f"{key} is no conversation that can be trained on: {e}. Mend it, or leave it out with --on-bad-row skip "
                    "(on_bad_row='skip')"
                ) from e
            gone.append(LeftOut(key, e.reason, 0))
            continue
        source = _fitting(source, room=policy.capacity - used, policy=policy)
        gone += source.news
        if len(source):
            used += policy.aligned(len(source))
            targets = (source.labels != IGNORE).numpy()
            sources.append(GivenSource(ids=source.input_ids.numpy(), targets=targets, number=i))
    return GivenRow(place=place, sources=sources, left_out=gone)


def _fitting(source: EncodedSource, *, room: int, policy: PackingPolicy) -> EncodedSource:
    """The source, or what of it has room in its row."""
    room = room // policy.multiple * policy.multiple
    if len(source) > room and policy.overlength == "error":
        raise too_long(f"row of {source.key!r}: the row", policy.capacity - room + len(source), capacity=policy.capacity)
    if not room:
        return EncodedSource.dropped(source.key, "overlength", len(source))
    (fitted,) = admitted(source, capacity=room, rule=policy.overlength)
    return fitted
