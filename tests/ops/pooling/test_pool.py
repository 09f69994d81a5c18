"""Poolings equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from hyperslab.geometry import Cut
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {
    "pooling": {
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "max_pool1d_with_indices",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "lp_pool1d",
        "lp_pool2d",
        "lp_pool3d",
    }
}

MAX = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}
AVG = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}
LP = {3: F.lp_pool1d, 4: F.lp_pool2d, 5: F.lp_pool3d}


def max_pool(x: Any, **options: Any) -> Any:
    return MAX[x.dim()](x, **options)


def avg_pool(x: Any, **options: Any) -> Any:
    return AVG[x.dim()](x, **options)


def max_pool_with_ties(x: Any, **options: Any) -> Any:
    """Values and indices in one, of a map with many equal values and the gradient of its own."""
    rounded = x.round().detach() + (x - x.detach())
    y, index = MAX[x.dim()](rounded, return_indices=True, **options)
    return y + index.to(y.dtype)


def lp_pool(x: Any, **options: Any) -> Any:
    del options["padding"]
    if x.dim() == 3:  # of this one torch wants a number
        (options["kernel_size"],) = options["kernel_size"]
    return LP[x.dim()](x, **options)


@st.composite
def examples(draw: st.DrawFn, ranks: int, kind: str) -> Example:
    """Overlap, gaps, padding, ceil_mode and the options of each kind."""
    n = draw(st.sampled_from([1, 2, 3, 3]))
    grid = draw(grids(ranks))
    kernel = [draw(st.integers(1, 4)) for _ in range(n)]
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    stride = draw(st.one_of(st.none(), st.lists(st.integers(1, 3), min_size=n, max_size=n)))
    dilation = [draw(st.integers(1, 2)) if kind == "max" else 1 for _ in range(n)]
    options: dict[str, Any] = {
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "ceil_mode": draw(st.booleans()),
    }
    if kind == "max":
        options["dilation"] = dilation
    elif kind == "lp":
        # Torch 2.11 makes ones of infinite norms, whose gradients are no numbers.
        known = F.lp_pool1d(torch.full((1, 1, 1), 2.0), torch.inf, 1).item() == 2
        infinite = [torch.inf, -torch.inf] if known else []
        options["norm_type"] = draw(st.sampled_from([2, 2, 4, 1, *infinite]))
        padding = [0] * n
    else:
        options["count_include_pad"] = draw(st.booleans())
        if n > 1:
            options["divisor_override"] = draw(st.sampled_from([None, None, 1, 3]))
    # The serial avg_pool3d refuses a volume smaller than its window, padded or not.
    spare = [0 if kind != "max" and n == 3 else p for p in padding]
    least = [
        max(parts, (k - 1) * d + 1 - 2 * p, d)  # see the last refusal below
        for parts, k, d, p in zip(parts_of(grid, n), kernel, dilation, spare, strict=True)
    ]
    extents = [draw(st.integers(low, low + 9)) for low in least]
    return Example(
        grid=grid,
        shape=(draw(st.integers(1, 3)), draw(st.integers(1, 3)), *extents),
        options=options,
        dtype=draw(dtypes),
        channels_last=n > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_max_pool(ranks: int) -> None:
    run_ranks(ranks, compare, max_pool, draw_examples(examples(ranks, "max"), 28))


@pytest.mark.parametrize("ranks", RANKS)
def test_any_avg_pool(ranks: int) -> None:
    run_ranks(ranks, compare, avg_pool, draw_examples(examples(ranks, "avg"), 28))


@pytest.mark.parametrize("ranks", RANKS)
def test_any_max_pool_with_indices(ranks: int) -> None:
    run_ranks(ranks, compare, max_pool_with_ties, draw_examples(examples(ranks, "max"), 28))


@pytest.mark.parametrize("ranks", RANKS)
def test_any_lp_pool(ranks: int) -> None:
    run_ranks(ranks, compare, lp_pool, draw_examples(examples(ranks, "lp"), 25))


def lowest_and_nan() -> list[bool]:
    """Where the padding or a NaN wins: the index is the window's own all the same."""
    x = torch.full((1, 2, 9, 5), -torch.inf)
    x[0, 1, 4, 2] = torch.nan
    x[0, 1, 5, 3] = torch.nan
    found = []
    for dilation in (1, 2):
        options: dict[str, Any] = {"stride": 1, "padding": 1, "dilation": dilation}
        y, index = F.max_pool2d(x, 3, return_indices=True, **options)
        grid = hs.Grid(height=3)
        z, moved = F.max_pool2d(hs.shard(x, grid), 3, return_indices=True, **options)
        found += [torch.equal(moved.full(), index)]
        found += [torch.equal(z.full().nan_to_num(7), y.nan_to_num(7))]
    one = torch.max_pool1d_with_indices(hs.shard(x[..., 0], hs.Grid(width=3)), 3)[1]
    return [*found, torch.equal(one.full(), torch.max_pool1d_with_indices(x[..., 0], 3)[1])]


def test_indices_of_infinite_values() -> None:
    assert run_ranks(3, lowest_and_nan) == [[True] * 5] * 3


def integers() -> list[bool]:
    grid = hs.Grid(depth=3)
    x = torch.randint(-50, -1, (2, 2, 7, 4, 4))
    y = F.max_pool3d(hs.shard(x, grid).float(), 3, 1, 1)
    return [torch.equal(y.full(), F.max_pool3d(x.float(), 3, 1, 1))]


def averages_of_integers() -> None:
    """Rounded towards zero on every rank, also on those whose windows are all within the edge."""
    grid, full = hs.Grid(depth=3), torch.randint(-50, 50, (2, 2, 9, 4))
    for name, options in (("avg_pool2d", {"padding": 1}), ("avg_pool1d", {"ceil_mode": True})):
        pool = getattr(F, name)
        x = full if name == "avg_pool2d" else full[..., 0]
        cut = hs.shard(x, grid) if x.dim() > 3 else hs.shard(full, grid)[..., 0]
        cut = cut.redistribute(cut.partition.with_dim(2, 9, Cut("depth", (0, 3, 7, 9))))
        expected = pool(x, 3, 2, count_include_pad=False, **options)
        found = pool(cut, 3, 2, count_include_pad=False, **options)
        assert found.partition.axes == ("depth",)
        assert found.dtype == torch.int64
        assert torch.equal(found.full(), expected)


def test_averages_of_integers() -> None:
    run_ranks(3, averages_of_integers)


def test_the_edge_never_wins_over_negative_values() -> None:
    assert run_ranks(3, integers) == [[True]] * 3


def refused(case: str) -> None:
    x = hs.shard(torch.randn(2, 2, 8, 8, 8), hs.Grid(height=2))
    if case == "fractional":
        F.fractional_max_pool3d(x, 2, output_size=3)
    elif case == "padding":
        F.avg_pool3d(x, 2, padding=2)
    elif case == "divisor":
        F.avg_pool3d(x, 2, divisor_override=0)
    elif case == "unbatched":
        F.max_pool2d(x, 2)
    elif case == "large":
        F.avg_pool3d(x, 9)
    elif case == "empty":
        thin = hs.shard(torch.randn(1, 1, 1, 4, 4), hs.Grid(height=2))
        F.max_pool3d(thin, (2, 1, 1), 1, (1, 0, 0), dilation=(2, 1, 1))


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("fractional", hs.UnsupportedOp, r"fractional_max_pool3d has no rule[^$]*x\.full\(\)"),
        ("padding", ValueError, "padding 2 must be at most half of the pooling window 2"),
        ("divisor", ValueError, "divisor_override must not be zero"),
        ("unbatched", hs.LayoutError, "max_pool2d needs a batched input of 4 dims"),
        ("large", hs.LayoutError, "the window is larger than the input"),
        ("empty", hs.LayoutError, "use a smaller dilation"),
    ],
)
def test_what_is_refused(case: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(2, refused, case)
