"""Poolings equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from tests.nn.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {
    "pooling": {
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
    }
}

MAX = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}
AVG = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}


def max_pool(x: Any, **options: Any) -> Any:
    return MAX[x.dim()](x, **options)


def avg_pool(x: Any, **options: Any) -> Any:
    return AVG[x.dim()](x, **options)


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
    else:
        options["count_include_pad"] = draw(st.booleans())
        if n > 1:
            options["divisor_override"] = draw(st.sampled_from([None, None, 1, 3]))
    # The serial avg_pool3d refuses a volume smaller than its window, padded or not.
    spare = [0 if kind == "avg" and n == 3 else p for p in padding]
    least = [
        max(parts, (k - 1) * d + 1 - 2 * p)
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
    run_ranks(ranks, compare, max_pool, draw_examples(examples(ranks, "max"), 40))


@pytest.mark.parametrize("ranks", RANKS)
def test_any_avg_pool(ranks: int) -> None:
    run_ranks(ranks, compare, avg_pool, draw_examples(examples(ranks, "avg"), 50))


def integers() -> list[bool]:
    grid = hs.Grid(depth=3)
    x = torch.randint(-50, -1, (2, 2, 7, 4, 4))
    y = F.max_pool3d(hs.shard(x, grid).float(), 3, 1, 1)
    return [torch.equal(y.full(), F.max_pool3d(x.float(), 3, 1, 1))]


def test_the_edge_never_wins_over_negative_values() -> None:
    assert run_ranks(3, integers) == [[True]] * 3


def refused(case: str) -> None:
    x = hs.shard(torch.randn(2, 2, 8, 8, 8), hs.Grid(height=2))
    if case == "indices":
        F.max_pool3d(x, 2, return_indices=True)
    elif case == "padding":
        F.avg_pool3d(x, 2, padding=2)
    elif case == "unbatched":
        F.max_pool2d(x, 2)
    elif case == "large":
        F.avg_pool3d(x, 9)


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("indices", hs.UnsupportedOp, "max_pool3d"),
        ("padding", ValueError, "padding 2 must be at most half of the pooling window 2"),
        ("unbatched", hs.LayoutError, "max_pool2d needs a batched input of 4 dims"),
        ("large", hs.LayoutError, "the window is larger than the input"),
    ],
)
def test_what_is_refused(case: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(2, refused, case)
