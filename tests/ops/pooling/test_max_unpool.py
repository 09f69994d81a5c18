"""Maximum unpooling equals the serial one (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {"pooling": {"max_unpool1d", "max_unpool2d", "max_unpool3d"}}

POOL = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}
UNPOOL: dict[int, Any] = {3: F.max_unpool1d, 4: F.max_unpool2d, 5: F.max_unpool3d}


def there_and_back(x: Any, own_size: bool, **window: Any) -> Any:
    """Pool, change the values, unpool; where windows overlap, the same maximum comes twice."""
    y, index = POOL[x.dim()](x, return_indices=True, **window)
    size = x.shape[2:] if own_size else None
    return UNPOOL[x.dim()](y * y, index, output_size=size, **window)


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    """Windows that overlap, that leave gaps and that do not fill the map."""
    n = draw(st.sampled_from([1, 2, 3, 3]))
    grid = draw(grids(ranks))
    kernel = [draw(st.integers(1, 4)) for _ in range(n)]
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    stride = [draw(st.integers(1, 3)) for _ in range(n)]
    outputs = [draw(st.integers(max(1, parts - 1), parts + 5)) for parts in parts_of(grid, n)]
    own_size = draw(st.booleans())
    spare = [draw(st.integers(0, s - 1)) if own_size else 0 for s in stride]
    extents = [
        max((o - 1) * s + k - 2 * p + more, parts, k if n == 3 else 1)
        for o, s, k, p, more, parts in zip(
            outputs, stride, kernel, padding, spare, parts_of(grid, n), strict=True
        )
    ]
    defaults = [
        ((e + 2 * p - k) // s) * s + k - 2 * p
        for e, k, s, p in zip(extents, kernel, stride, padding, strict=True)
    ]
    return Example(
        grid=grid,
        shape=(draw(st.integers(1, 3)), draw(st.integers(1, 3)), *extents),
        options={
            "kernel_size": kernel,
            "stride": stride,
            "padding": padding,
            # With another size torch takes the indices for positions that they are not.
            "own_size": own_size or extents != defaults,
        },
        dtype=draw(dtypes),
        channels_last=n > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_unpooling(ranks: int) -> None:
    run_ranks(ranks, compare, there_and_back, draw_examples(examples(ranks), 28))


def ways() -> list[bool]:
    """Indices that every rank holds whole; half precision under autocast; modules."""
    grid, x = hs.Grid(depth=2, height=2), torch.randn(2, 3, 7, 9, 4)
    y, index = F.max_pool3d(x, 2, return_indices=True)
    expected = F.max_unpool3d(y, index, 2, output_size=x.shape)
    shared = F.max_unpool3d(hs.shard(y, grid), index, 2, output_size=x.shape)
    with torch.autocast("cpu"), torch.no_grad():
        low, half = x.bfloat16(), F.max_pool3d(x.bfloat16(), 2, return_indices=True)
        wide = F.max_unpool3d(*half, 2, output_size=x.shape)
        cut = F.max_pool3d(hs.shard(low, grid), 2, return_indices=True)
        found = F.max_unpool3d(*cut, 2, output_size=x.shape)
    pool, unpool = torch.nn.MaxPool3d(2, return_indices=True), torch.nn.MaxUnpool3d(2)
    modules = unpool(*pool(hs.shard(x, grid)), output_size=x.shape)
    return [
        torch.equal(shared.full(), expected),
        found.dtype == wide.dtype and torch.equal(found.full(), wide),
        torch.equal(modules.full(), expected),
    ]


def test_other_ways_to_call_it() -> None:
    assert run_ranks(4, ways) == [[True] * 3] * 4


def refused(case: str) -> None:
    x = hs.shard(torch.randn(1, 2, 8, 6), hs.Grid(height=2))
    y, index = F.max_pool2d(x, 2, return_indices=True)
    if case == "far":
        F.max_unpool2d(y, 47 - index, 2)
    elif case == "one rank":
        F.max_unpool2d(y, torch.where(y == y.full().max(), index * 0 + 47, index * 0), 2)
    elif case == "size":
        F.max_unpool2d(y, index, 2, output_size=(8, 7))
    elif case == "far size":
        F.max_unpool2d(y, index, 2, output_size=(8, 12))
    elif case == "unbatched":
        F.max_unpool1d(y, index, 2)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("far", "an index lies outside the window"),
        ("one rank", "an index lies outside the window"),
        ("size", "give the output_size of the map that was pooled"),
        ("far size", "invalid output_size"),
        ("unbatched", "max_unpool1d needs a batched input of 3 dims"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(2, refused, case)
