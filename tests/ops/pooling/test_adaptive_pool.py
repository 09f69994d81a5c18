"""Adaptive poolings equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from hyperslab.comm.communicator import GroupCommunicator
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {
    "pooling": {
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "adaptive_max_pool1d",
        "adaptive_max_pool2d",
        "adaptive_max_pool3d",
        "adaptive_max_pool1d_with_indices",
        "adaptive_max_pool2d_with_indices",
        "adaptive_max_pool3d_with_indices",
    }
}

AVG = {3: F.adaptive_avg_pool1d, 4: F.adaptive_avg_pool2d, 5: F.adaptive_avg_pool3d}
MAX = {3: F.adaptive_max_pool1d, 4: F.adaptive_max_pool2d, 5: F.adaptive_max_pool3d}


def avg_pool(x: Any, output_size: Any) -> Any:
    return AVG[x.dim()](x, output_size)


def twice(x: Any, output_size: Any) -> Any:
    """Gradients that are differentiated once more."""
    y = AVG[x.dim()](x, output_size) + MAX[x.dim()](x, output_size)
    (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    return gradient


def max_pool_with_ties(x: Any, output_size: Any) -> Any:
    """Values and indices in one, of a map with many equal values and the gradient of its own."""
    rounded = x.round().detach() + (x - x.detach())
    y, index = MAX[x.dim()](rounded, output_size, return_indices=True)
    return y + index.to(y.dtype)


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    """To one output, fewer than ranks, as many as inputs (None) and more."""
    n = draw(st.sampled_from([1, 2, 3, 3]))
    grid = draw(grids(ranks))
    extents = [draw(st.integers(parts, parts + 9)) for parts in parts_of(grid, n)]
    some = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 13])
    # torch.adaptive_avg_pool1d takes no None
    size = st.one_of(st.none(), some, some) if n > 1 else some
    sizes: Any = draw(st.one_of(st.just(1), some, st.tuples(*[size] * n), st.tuples(*[size] * n)))
    return Example(
        grid=grid,
        shape=(draw(st.integers(1, 3)), draw(st.integers(1, 3)), *extents),
        options={"output_size": sizes},
        dtype=draw(dtypes),
        channels_last=n > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("op", [avg_pool, max_pool_with_ties])
def test_any_adaptive_pool(op: Any, ranks: int) -> None:
    run_ranks(ranks, compare, op, draw_examples(examples(ranks), 28))


@pytest.mark.parametrize("ranks", [1, 4])
def test_second_derivatives(ranks: int) -> None:
    run_ranks(ranks, compare, twice, draw_examples(examples(ranks), 15))


def global_pools() -> tuple[list[int], list[bool]]:
    """How much arrives at a rank for the pooling of everything; of equals the first wins."""
    x = hs.shard(torch.ones(2, 3, 8, 6, 5), hs.Grid(depth=2, height=2)).requires_grad_()
    arrived: list[int] = []
    begin = GroupCommunicator.exchange

    def count(self: Any, sends: Any, receives: Any, what: str) -> Any:
        arrived.extend(buffer.numel() for _, buffer in receives)
        return begin(self, sends, receives, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupCommunicator, "exchange", count)
        y = F.adaptive_max_pool3d(x, 1)
        z = F.adaptive_avg_pool3d(x, 1)
    (y + 0 * z).sum().backward()
    assert x.grad is not None
    gradient = x.grad.full()
    return [sum(arrived)], [
        gradient[:, :, 0, 0, 0].eq(1).all().item() is True,
        gradient.sum().item() == 6,
        y.partition.axes == (),
    ]


def test_global_pooling_gathers_no_volume() -> None:
    for arrived, right in run_ranks(4, global_pools):
        assert right == [True] * 3
        assert arrived[0] <= 2 * 3 * 2 * 2 * 2  # two values and their indices from each axis


def awkward_values() -> list[bool]:
    """Infinities and NaN, whose last one torch names."""
    found = []
    for value in (-torch.inf, torch.nan):
        x = torch.full((1, 2, 9, 5), value)
        x[0, 1, 0] = 3.0
        for sizes in ((1, 1), (2, 3), (4, 5)):
            y, index = F.adaptive_max_pool2d(x, sizes, return_indices=True)
            cut = hs.shard(x, hs.Grid(height=3))
            z, moved = F.adaptive_max_pool2d(cut, sizes, return_indices=True)
            found += [torch.equal(moved.full(), index)]
            found += [torch.equal(z.full().nan_to_num(7), y.nan_to_num(7))]
    one = torch.randn(2, 2, 7)
    both = zip(
        torch.adaptive_max_pool1d(hs.shard(one, hs.Grid(width=3)), 4),
        torch.adaptive_max_pool1d(one, 4),
        strict=True,
    )
    return [*found, *(torch.equal(a.full(), b) for a, b in both)]


def test_awkward_values() -> None:
    assert run_ranks(3, awkward_values) == [[True] * 14] * 3


def half_precision(autocast: bool) -> list[float]:
    x = torch.randn(2, 3, 7, 5, 6, dtype=torch.bfloat16) + 3
    cut, errors = hs.shard(x, hs.Grid(depth=3)), []
    for pool in (F.adaptive_avg_pool3d, F.adaptive_max_pool3d):
        for sizes in (1, (4, 2, 3)):
            with torch.autocast("cpu", enabled=autocast):
                y, z = pool(cut, sizes), pool(x, sizes)
            assert y.dtype == z.dtype
            exact = pool(x.double(), sizes)
            errors.append(float((y.full() - exact).norm() / exact.norm()))
    return errors


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_rounded_once(autocast: bool) -> None:
    for errors in run_ranks(3, half_precision, autocast):
        assert max(errors) < (1e-6 if autocast else 3e-3)


def refused(case: str) -> None:
    x = hs.shard(torch.randn(2, 2, 8, 8, 8), hs.Grid(height=2))
    if case == "unbatched":
        F.adaptive_avg_pool2d(x, 2)
    elif case == "length":
        F.adaptive_max_pool3d(x, (2, 2))
    elif case == "zero":
        F.adaptive_avg_pool3d(x, 0)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unbatched", "adaptive_avg_pool2d needs a batched input of 4 dims"),
        ("length", r"output_size \(2, 2\) should be one number or 3"),
        ("zero", "use an output_size of at least 1"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(2, refused, case)
