"""M-RoPE positions of one source, computed without a model."""

from __future__ import annotations

import torch
from torch import Tensor


def mrope_positions(input_ids: Tensor, grids: Tensor, *, image_token_id: int, merge_size: int) -> Tensor:
    """Positions in time, height and width, int64 ``[3, L]``, as Qwen2-VL, Qwen2.5-VL and Qwen3-VL count them for images.

    A text token takes the next position in all three. The tokens of an image share one position in time, and lie in height and
    width from there on; the text behind goes on after the larger of both, so it ends at less than ``L``.

    Args:
        input_ids: int64 ``[L]``, each image as many placeholders as it has tokens.
        grids: int64 ``[images, 3]``: time, height and width of each image in patches, in the order of the placeholders.
        image_token_id: the placeholder.
        merge_size: patches along each side of a token.

    Raises:
        ValueError: if the placeholders are not as many as the grids say.

    Example:
        >>> mrope_positions(torch.tensor([5, 9, 9, 6]), torch.tensor([[1, 2, 4]]), image_token_id=9, merge_size=2).tolist()
        [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    """
    places = torch.nonzero(input_ids == image_token_id)[:, 0].tolist()
    sizes = [(t, h // merge_size, w // merge_size) for t, h, w in grids.tolist()]
    wanted = sum(t * h * w for t, h, w in sizes)
    if len(places) != wanted:
        raise ValueError(f"{len(places)} placeholders for {len(sizes)} images of {wanted} tokens: they must be equally many")
    parts: list[Tensor] = []
    done = position = taken = 0
    for t, h, w in sizes:
        begin, count = places[taken], t * h * w
        text = torch.arange(begin - done) + position
        parts.append(text.expand(3, -1))
        position += begin - done
        grid = torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij")
        parts.append(torch.stack(grid).reshape(3, -1) + position)
        position += max(h, w)
        done, taken = begin + count, taken + count
    parts.append((torch.arange(len(input_ids) - done) + position).expand(3, -1))
    return torch.cat(parts, dim=1)
