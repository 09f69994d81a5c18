"""Layer and RMS normalisation over last dims, cut or not, equal the serial ones (tier: a few gloo
ranks).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {"normalization": {"layer_norm", "rms_norm"}}


def layer_norm(x: Any, weight: Any, bias: Any, *, last: int, eps: float) -> Any:
    return F.layer_norm(x, x.shape[-last:], weight, bias, eps)


def rms_norm(x: Any, weight: Any, *, last: int, eps: float | None) -> Any:
    return F.rms_norm(x, x.shape[-last:], weight, eps)


@st.composite
def examples(draw: st.DrawFn, ranks: int, biased: bool) -> Example:
    n = draw(st.sampled_from([0, 1, 2, 3, 3]))
    grid = draw(grids(ranks))
    extents = [draw(st.integers(parts, parts + 4)) for parts in parts_of(grid, n)] if n else []
    extents = [*extents[:-1], extents[-1] + 2] if n else []  # of two values the gradient is zero
    shape = (draw(st.integers(1, 4)), draw(st.integers(3, 5)), *extents)
    last = draw(st.integers(1, len(shape) - 1))
    weight, bias = (draw(st.sampled_from([shape[-last:], None])) for _ in range(2))
    return Example(
        grid=grid,
        shape=shape,
        weights=(weight, bias) if biased else (weight,),
        options={"last": last, "eps": draw(st.sampled_from([1e-5, 1e-2] + [None] * (not biased)))},
        dtype=draw(dtypes),
        channels_last=n > 1 and draw(st.booleans()),
        mean=draw(st.sampled_from([0.0, 0.0, 3.0])),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_layer_norm(ranks: int) -> None:
    run_ranks(ranks, compare, layer_norm, draw_examples(examples(ranks, True), 28))


@pytest.mark.parametrize("ranks", RANKS)
def test_any_rms_norm(ranks: int) -> None:
    run_ranks(ranks, compare, rms_norm, draw_examples(examples(ranks, False), 28))


def half_precision() -> None:
    """The types of torch under autocast, without it, and the values near to float32's."""
    grid, full = hs.Grid(depth=2), torch.randn(2, 3, 6, 4, 4)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for x in (full, full.bfloat16()):
                for op in (F.layer_norm, F.rms_norm):
                    for shape in ((6, 4, 4), (4,)):
                        expected, found = op(x, shape), op(hs.shard(x, grid), shape)
                        assert found.dtype == expected.dtype
                        assert torch.allclose(
                            found.full().float(), expected.float(), rtol=2e-2, atol=2e-2
                        )


def test_half_precision() -> None:
    run_ranks(2, half_precision)


def complex_numbers() -> None:
    full = torch.randn(2, 3, 6, dtype=torch.complex64)
    weight = torch.randn(6, dtype=torch.complex64)
    x = hs.shard(full[:, :, :, None, None], hs.Grid(depth=2))[..., 0, 0]
    expected = F.rms_norm(full, (6,), weight, 0.5)
    assert torch.allclose(F.rms_norm(x, (6,), weight, 0.5).full(), expected, rtol=1e-5)


def test_complex_numbers() -> None:
    run_ranks(2, complex_numbers)


def far_from_zero(dtype: torch.dtype) -> float:
    """Error of the deviation of values whose mean is 1000 times it."""
    x = (torch.randn(2, 3, 9, 8, 8, dtype=torch.float64) + 1e3).to(dtype)
    y = F.layer_norm(hs.shard(x, hs.Grid(depth=4)), (9, 8, 8), eps=0.0).full()
    return (y.double().std(dim=[2, 3, 4], correction=0) - 1).abs().max().item()


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_nothing_cancels_far_from_zero(dtype: torch.dtype, error: float) -> None:
    assert max(run_ranks(4, far_from_zero, dtype)) <= error


def refused(case: str) -> None:
    grid = hs.Grid(depth=2)
    x = hs.shard(torch.randn(2, 3, 6, 4, 4), grid)
    {
        "local shape": lambda: F.layer_norm(x, (3, 4, 4)),
        "cut weight": lambda: F.rms_norm(x, (4,), hs.shard(torch.ones(4), grid)),
        "parameter": lambda: F.layer_norm(x, (6, 4, 4), torch.ones(4)),
    }[case]()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("local shape", "shapes of a cut tensor are global"),
        ("cut weight", "those beside it are ordinary"),
        ("parameter", r"layer_norm over \(6, 4, 4\) has a parameter \(4,\)"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(hs.LayoutError, match=message):
        run_ranks(2, refused, case)
