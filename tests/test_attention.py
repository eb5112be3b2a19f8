import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pack.attention import SegmentsBackend, THDInputs, segment_attention, segment_lengths, segments
from tests.reference_attention import reference_attention


def random_row(total: int, *, heads: int = 4, groups: int = 2, size: int = 8, out: int = 6, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, size), (groups, size), (groups, out)]
    return [torch.randn(1, h, total, d, generator=generator, dtype=torch.float64).requires_grad_() for h, d in shapes]


def boundaries(*offsets: int) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


CASES = {
    "causal": {},
    "not-causal": {"causal": False},
    "window": {"window": 3},
    "window-of-one": {"window": 1},
    "window-longer-than-all": {"window": 99},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "everything": {"window": 4, "softcap": 1.5, "sinks": True},
    "not-causal-sinks": {"causal": False, "sinks": True},
}


@pytest.mark.parametrize("block", [3, 1024])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_segments_follow_the_formulas(case: str, groups: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_QUERY_BLOCK", block)
    options = dict(CASES[case])
    offsets = [0, 7, 8, 20, 25, 25, 34]
    assert max(b - a for a, b in itertools.pairwise(offsets)) > 2 * 3  # several blocks, windows that cut
    q, k, v = random_row(34, groups=groups)
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_() if options.pop("sinks", False) else None
    out = segment_attention(q, k, v, boundaries=boundaries(*offsets), sinks=sinks, **options)
    flat = [x[0].transpose(0, 1) for x in (q, k, v)]
    expected = reference_attention(*flat, offsets=offsets, scale=8**-0.5, sinks=sinks, **options).transpose(0, 1)[None]
    assert out.shape == (1, 4, 34, 6)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)

    wanted = [x for x in (q, k, v, sinks) if x is not None]
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(
        torch.autograd.grad((out * weight).sum(), wanted), torch.autograd.grad((expected * weight).sum(), wanted), strict=True
    ):
        assert float(theirs.abs().max()) > 1e-3 or (case == "window-of-one" and not theirs.any())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ["causal", "not-causal", "everything"])
def test_gaps_are_zero_and_seen_by_nobody(case: str) -> None:
    options = dict(CASES[case])
    real, physical, lengths = [0, 5, 6, 14], [0, 8, 8 + 1, 24], [5, 1, 8]
    assert [b - a for a, b in itertools.pairwise(physical)] > lengths  # a gap inside, none after the second, one at the end
    q, k, v = [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in random_row(24)]
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_() if options.pop("sinks", False) else None
    inputs = THDInputs(boundaries(*real), boundaries(*physical), 15, 24, pad_between_seqs=True)
    out = SegmentsBackend()(q, k, v, inputs=inputs, sinks=sinks, **options)
    expected = reference_attention(q, k, v, offsets=physical, lengths=lengths, scale=8**-0.5, sinks=sinks, **options)
    assert out.shape == (24, 4, 6)
    assert not out[5:8].any()
    assert not out[17:].any()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = [x for x in (q, k, v, sinks) if x is not None]
    ours = torch.autograd.grad((out * weight).sum(), wanted)
    assert ours[0][:5].any()
    assert not any(gradient[5:8].any() or gradient[17:].any() for gradient in ours[:3])
    for mine, theirs in zip(ours, torch.autograd.grad((expected * weight).sum(), wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_real_tokens_are_the_same_with_gaps_and_with_physical_boundaries() -> None:
    q, k, v = (x.detach()[0].transpose(0, 1) for x in random_row(12))
    real, physical = boundaries(0, 5, 8), boundaries(0, 8, 12)
    gaps = SegmentsBackend()(q, k, v, inputs=THDInputs(real, physical, 8, 12, pad_between_seqs=True))
    tails = SegmentsBackend()(q, k, v, inputs=THDInputs(physical, physical, 8, 12))
    torch.testing.assert_close(gaps[[0, 1, 2, 3, 4, 8, 9, 10]], tails[[0, 1, 2, 3, 4, 8, 9, 10]], rtol=0, atol=1e-12)
    assert tails[5:8].all()


def test_scale_is_followed() -> None:
    q, k, v = random_row(9)
    cu = boundaries(0, 4, 9)
    flat = [x[0].transpose(0, 1) for x in (q, k, v)]
    expected = reference_attention(*flat, offsets=[0, 4, 9], scale=1.3).transpose(0, 1)[None]
    assert not torch.allclose(segment_attention(q, k, v, boundaries=cu), expected, atol=1e-3)
    torch.testing.assert_close(segment_attention(q, k, v, boundaries=cu, scale=1.3), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["fused", "explicit"])
def test_dropout_drops(options: dict[str, float]) -> None:
    q, k, v = random_row(30)
    cu = boundaries(0, 20, 30)

    def run(seed: int) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return segment_attention(q, k, v, boundaries=cu, dropout=0.5, **options)

    assert torch.equal(run(1), run(1))
    assert not torch.allclose(run(1), run(2))
    average = torch.stack([run(seed) for seed in range(300)]).mean(0)
    torch.testing.assert_close(average, segment_attention(q, k, v, boundaries=cu, **options), rtol=0, atol=0.5)


def test_half_precision_keeps_its_dtype() -> None:
    q, k, v = (x.detach().bfloat16() for x in random_row(20))
    exact = segment_attention(*(x.double() for x in (q, k, v)), boundaries=boundaries(0, 8, 20), softcap=2.0, window=3)
    out = segment_attention(q, k, v, boundaries=boundaries(0, 8, 20), softcap=2.0, window=3)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=3e-2)


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


@pytest.mark.parametrize("options", [{}, {"window": 16}, {"softcap": 5.0}], ids=["causal", "window", "softcap"])
def test_nothing_as_large_as_the_square_of_the_row(options: dict[str, float]) -> None:
    total, length = 4096, 128
    q, k, v = (x.detach().float().requires_grad_() for x in random_row(total))
    cu = torch.arange(0, total + 1, length, dtype=torch.int32)
    with LargestTensor() as largest:
        segment_attention(q, k, v, boundaries=cu, **options).sum().backward()
    assert largest.numel >= q.numel()
    assert largest.numel <= max(q.numel(), 4 * length**2) < total**2 / 100


def test_lengths_are_read_from_boundaries() -> None:
    assert segment_lengths(boundaries(0, 3, 3, 8), total=8) == [3, 0, 5]


@pytest.mark.parametrize(
    ("offsets", "total", "message"),
    [
        (torch.tensor([0, 4]), 4, r"int32 of shape \[N\+1\].*got torch.int64"),
        (torch.tensor([[0, 4]], dtype=torch.int32), 4, r"of shape \[1, 2\].*cu_seqlens_padded"),
        (boundaries(0), 0, "N >= 1"),
        (boundaries(1, 4), 4, r"start at 0 and never decrease, got \[1, 4\]"),
        (boundaries(0, 3, 2, 4), 4, r"never decrease, got \[0, 3, 2, 4\]"),
        (boundaries(0, 3), 4, "last boundary is 3 but the row has 4 tokens.*physical boundaries"),
        (boundaries(0, 5), 4, "last boundary is 5 but the row has 4 tokens"),
    ],
)
def test_bad_boundaries_are_refused(offsets: Tensor, total: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        segment_lengths(offsets, total=total)


def test_bad_shapes_and_options_are_refused() -> None:
    q, k, v = random_row(6)
    cu = boundaries(0, 6)
    with pytest.raises(ValueError, match=r"shape \[1, heads, T, D\], got query \[2, 4, 6, 8\].*one row per batch"):
        segment_attention(q.expand(2, -1, -1, -1), k, v, boundaries=cu)
    with pytest.raises(ValueError, match="differ in length, heads or head size"):
        segment_attention(q, k[:, :, :5], v[:, :, :5], boundaries=cu)
    with pytest.raises(ValueError, match="3 query heads cannot be shared out over 2 key heads"):
        segment_attention(q[:, :3], k, v, boundaries=cu)
    with pytest.raises(ValueError, match=r"each of 4 query heads, got shape \[3\]"):
        segment_attention(q, k, v, boundaries=cu, sinks=torch.zeros(3))
    with pytest.raises(ValueError, match=r"window=0 .* at least 1 token"):
        segment_attention(q, k, v, boundaries=cu, window=0)
    with pytest.raises(ValueError, match=r"window=2 \(causal=False\).*needs causal attention"):
        segment_attention(q, k, v, boundaries=cu, window=2, causal=False)


def test_the_reference_sees_a_leak() -> None:
    # One segment instead of two moves the second: the comparison above can fail.
    q, k, v = random_row(8)
    apart = segment_attention(q, k, v, boundaries=boundaries(0, 4, 8))
    joined = segment_attention(q, k, v, boundaries=boundaries(0, 8))
    assert torch.equal(apart[:, :, :1], joined[:, :, :1])
    assert float((apart - joined)[:, :, 4:].detach().abs().max()) > 0.1
    assert not math.isnan(float(apart.detach().sum()))
