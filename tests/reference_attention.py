"""Attention of a packed row in plain formulas; every backend is judged by it.

For source b with L real tokens from place s on, query token i, key token j and head a, whose keys are those of head
``c = a // (h / g)``::

    S[i, j] = scale * <q[s + i, a], k[s + j, c]>          softcap: S = softcap * tanh(S / softcap)
    seen    = (not causal or j <= i) and (no window or j > i - window)
    P[i, :] = softmax over the seen j of S[i, :]          sinks: one more column of sinks[a], that no value belongs to
    out[s + i, a] = sum over j of P[i, j] * v[s + j, c]

Places of no source are 0.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets: list[int],
    lengths: list[int] | None = None,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``[t, h, dv]`` of q ``[t, h, d]``, k ``[t, g, d]``, v ``[t, g, dv]``; ``lengths`` None: sources fill their places."""
    if lengths is None:
        lengths = [stop - start for start, stop in itertools.pairwise(offsets)]
    share = q.shape[1] // k.shape[1]
    parts = []
    for start, stop, length in zip(offsets, offsets[1:], lengths, strict=False):
        i, j = torch.arange(length)[:, None], torch.arange(length)
        seen = torch.ones(length, length, dtype=torch.bool)
        if causal:
            seen &= j <= i
        if window is not None:
            seen &= j > i - window
        places = slice(start, start + length)
        heads = []
        for head in range(q.shape[1]):
            scores = scale * (q[places, head] @ k[places, head // share].T)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].expand(length, 1)], dim=1)
            weights = torch.softmax(scores, dim=1)[:, :length]
            heads.append(weights @ v[places, head // share])
        parts += [torch.stack(heads, dim=1), v.new_zeros(stop - start - length, q.shape[1], v.shape[2])]
    return torch.cat([*parts, v.new_zeros(len(q) - offsets[-1], q.shape[1], v.shape[2])])
