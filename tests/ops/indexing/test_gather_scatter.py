"""Reading and writing by positions equals the serial one (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {
    "indexing": {
        "gather",
        "take_along_dim",
        "index_select",
        "embedding",
        "one_hot",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce",
        "scatter_reduce_",
        "index_add",
        "index_add_",
        "index_copy",
        "index_copy_",
        "index_fill",
        "index_fill_",
    },
}


def positions(shape: tuple[int, ...], dim: int, extent: int) -> torch.Tensor:
    """Distinct along ``dim``, so that it does not matter which one is written last."""
    draws = torch.rand((*shape[:dim], extent, *shape[dim + 1 :]), generator=_generator())
    return draws.argsort(dim).narrow(dim, 0, shape[dim])


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def by_positions(
    x: Any, source: Any, *, how: str, dim: int, cut: int, method: bool, seeds: tuple[int, int]
) -> Any:
    """Bit 0 of ``cut``: the index is cut; bit 1: the source is."""
    index = positions(tuple(source.shape), dim % source.dim(), x.shape[dim])
    y = recut(x * 2, seeds[0])
    if isinstance(x, hs.Sharded):
        index = recut(hs.shard(index, x.grid), seeds[1]) if cut & 1 else index
        source = hs.shard(source, x.grid) if cut & 2 else source
    flat = torch.arange(source.shape[dim])
    args = {
        "gather": (dim, index),
        "take_along_dim": (index, dim),
        "scatter": (dim, index, source),
        "scatter_": (dim, index, source),
        "scatter value": (dim, index, 1.5),
        "scatter_add": (dim, index, source),
        "scatter_add_": (dim, index, source),
        "scatter_reduce": (dim, index, source, "amax"),
        "scatter_reduce_": (dim, index, source, "sum"),
        "index_add": (dim, flat, source),
        "index_add_": (dim, flat, source),
        "index_copy": (dim, flat, source),
        "index_copy_": (dim, flat, source),
        "index_fill": (dim, flat, 0.5),
        "index_fill_": (dim, flat, 0.5),
        "index_select": (dim, flat),
    }[how]
    name = how.split()[0]
    found = getattr(y, name)(*args) if method else getattr(torch, name)(y, *args)
    if name.endswith("_"):
        assert found is y
    return found


WAYS = """gather take_along_dim scatter scatter_ scatter_add scatter_add_ scatter_reduce
scatter_reduce_ index_add index_add_ index_copy index_copy_ index_fill index_fill_ index_select"""


@st.composite
def writings(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([0, 1, 2, 3]))
    grid = draw(grids(ranks))
    least = [grid["data"], 1, *(parts_of(grid, n) if n else ())]
    shape = tuple(draw(st.integers(low, low + 3)) for low in least)
    free = [d for d, ways in enumerate(least) if ways == 1]
    dim = draw(st.sampled_from(free))
    fewer = draw(st.integers(1, shape[dim]))
    how = draw(st.sampled_from([*WAYS.split(), "scatter value"]))
    return Example(
        grid=grid,
        shape=shape,
        weights=((*shape[:dim], fewer, *shape[dim + 1 :]),),
        options={
            "how": how,
            "dim": draw(st.sampled_from([dim, dim - len(shape)])),
            "cut": draw(st.integers(0, 3)),
            "method": how.endswith("_") or draw(st.booleans()),
            "seeds": (draw(st.integers(0, 5)), draw(st.integers(0, 5))),
        },
        dtype=draw(dtypes),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_writing(ranks: int) -> None:
    run_ranks(ranks, compare, by_positions, draw_examples(writings(ranks), 28))


def looked_up(x: Any, table: torch.Tensor, *, how: str) -> Any:
    """Rows of a table, one for each of the classes that a volume of labels names."""
    labels = (x.detach() * 3).abs().long().clamp(max=4).squeeze(1)
    if how == "embedding":
        return F.embedding(labels, table) * x.squeeze(1)[..., None]
    if how == "table":
        return table[labels] * x.squeeze(1)[..., None]
    if how == "all classes":
        return F.one_hot(labels) * x.mean()
    return F.one_hot(labels, 5) * x.mean() * table[:, 0]


@pytest.mark.parametrize("how", ["embedding", "table", "one_hot", "all classes"])
def test_tables(how: str) -> None:
    cases = [
        Example(grid=grid, shape=(3, 1, 5, 4, 6), weights=((5, 2),), options={"how": how})
        for grid in ({"data": 2, "depth": 2}, {"depth": 2, "width": 2})
    ]
    run_ranks(4, compare, looked_up, cases)


def values_in_ordinary(x: Any) -> Any:
    """Ordinary zeros get values that have gradients, cut ones and what every rank has."""
    labels = (x.detach() * 3).abs().long().clamp(max=3)[:, :1]
    placed = torch.zeros(x.shape[0], 4, *x.shape[2:], dtype=x.dtype).scatter_(1, labels, x[:, :1])
    means, whole = x.mean((0, 2, 3, 4)), torch.zeros(5, dtype=x.dtype)
    copied = whole.index_copy_(0, torch.tensor([3, 1]), means)
    assert copied is whole
    rows = torch.zeros(4, 2, dtype=x.dtype)
    rows.index_add_(0, labels.flatten(), x.movedim(1, -1).reshape(-1, 2))
    return placed * copied[3] * rows.square().sum()


def test_values_with_gradients_in_ordinary_tensors() -> None:
    grids = ({"data": 2, "depth": 2}, {"depth": 2, "width": 2}, {"height": 4})
    run_ranks(4, compare, values_in_ordinary, [Example(grid, (2, 2, 5, 4, 6)) for grid in grids])


def classes_that_are_none() -> None:
    grid, labels = hs.Grid(depth=2), torch.arange(8).view(1, 1, 2, 2, 2)
    with pytest.raises(RuntimeError, match="a class is -1; classes are counted from 0"):
        F.one_hot(hs.shard(labels - 1, grid))  # of which one rank alone has it
    with pytest.raises(hs.LayoutError, match="quantile: no quantile is sought"):
        hs.shard(labels.double(), grid).quantile(torch.tensor([], dtype=torch.float64), 2)


def test_classes_and_quantiles_that_are_none() -> None:
    run_ranks(2, classes_that_are_none)


def one_hot_of_zeros(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """As segmentation libraries write it: zeros of the whole shape, then ones in place."""
    zeros = torch.zeros(size=[labels.shape[0], classes, *labels.shape[2:]])
    found = zeros.scatter_(dim=1, index=labels.long(), value=1)
    assert found is zeros
    return zeros * 2


def written_into_ordinary() -> None:
    grid = hs.Grid(depth=2)
    full = torch.randint(0, 4, (2, 1, 5, 4, 4)).float()
    labels = hs.shard(full, grid)
    found = one_hot_of_zeros(labels, 4)
    assert isinstance(found, hs.Sharded)
    assert found.partition.axes == ("depth",)
    assert torch.equal(found.full(), one_hot_of_zeros(full, 4))
    zeros = torch.zeros(2, 4, 5, 4, 4)
    zeros.scatter_(1, labels.long(), 1)
    zeros.mul_(3)[:, 1:].add_(1)
    assert zeros.local.untyped_storage().nbytes() == zeros.local.numel() * 4
    view = torch.zeros(2, 4, 5, 4, 4)
    part = view[0]
    for other in (
        view,
        torch.zeros(2, 8, 5, 4, 4)[:, :4],
        torch.zeros(2, 4, 5, 4, 4).requires_grad_(),
    ):
        with pytest.raises(hs.LayoutError, match="use scatter, which returns a new tensor"):
            other.scatter_(1, labels.long(), 1)
    assert part.abs().sum() == 0
    assert torch.equal(torch.scatter(view, 1, labels.long(), 1).full() * 2, found.full())


def test_an_ordinary_tensor_becomes_cut() -> None:
    run_ranks(2, written_into_ordinary)


def positions_of_the_ranks() -> list[bool]:
    """Positions that were found in a cut tensor, and that all ranks have."""
    full = torch.randn(1, 4, 6, 2, 2)
    x = hs.shard(full, hs.Grid(depth=2))
    found: list[list[Any]] = []
    for y in (x, full):
        at = y.mean((2, 3, 4)).flatten().topk(2).indices
        other = y.narrow(1, 0, 2)
        found.append(
            [
                y.index_select(1, at),
                y.index_add(1, at, other),
                y.index_copy(1, at, other),
                y.index_fill(1, at, 2.0),
            ]
        )
    return [torch.equal(a.full(), b) for a, b in zip(*found, strict=True)]


def test_positions_that_all_ranks_have() -> None:
    assert run_ranks(2, positions_of_the_ranks) == [[True] * 4] * 2


def refused(case: str) -> None:
    grid = hs.Grid(depth=2)
    x = hs.shard(torch.randn(2, 3, 6, 4, 4), grid)
    index = hs.shard(torch.zeros(2, 3, 6, 4, 4, dtype=torch.int64), grid)
    table = torch.randn(4, 2)
    {
        "cut": lambda: x.gather(2, index),
        "cut scatter": lambda: x.scatter(2, index, 1.0),
        "shape": lambda: x.scatter(1, torch.zeros(2, 3, 5, 4, 4, dtype=torch.int64), 1.0),
        "larger": lambda: x.gather(1, torch.zeros(3, 1, 6, 4, 4, dtype=torch.int64)),
        "copy": lambda: x.flatten(1).scatter_(1, torch.zeros(2, 1, dtype=torch.int64), 1.0),
        "out": lambda: torch.scatter(x, 1, index, 1.0, out=torch.empty(0)),
        "sparse": lambda: torch.gather(x, 1, index, sparse_grad=True),
        "no dim": lambda: torch.take_along_dim(x, index),
        "table": lambda: F.embedding(index, table, max_norm=1.0),
        "positions": lambda: torch.index_select(table, 0, hs.shard(torch.tensor([0, 1]), grid)),
    }[case]()


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("cut", hs.LayoutError, r"dim 2, which is cut.*\n.*hyperslab.gather\(x, \('depth',\)\)"),
        ("cut scatter", hs.LayoutError, "scatter along dim 2, which is cut"),
        ("shape", hs.LayoutError, "the other dims of the global shapes differ"),
        ("larger", hs.LayoutError, "the index is larger"),
        ("copy", hs.LayoutError, "scatter in place, on a copy"),
        ("out", hs.LayoutError, r"scatter\(out=...\) has no rule"),
        ("sparse", hs.UnsupportedOp, "sparse_grad"),
        ("no dim", hs.UnsupportedOp, "needs a dim"),
        ("table", hs.UnsupportedOp, "without max_norm"),
        ("positions", hs.UnsupportedOp, "for a cut input"),
    ],
)
def test_what_is_refused(case: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(2, refused, case)


def binned(x: Any, *, how: str, count: int, whole: bool) -> Any:
    """The sums of voxels that have the same number; ``whole``: every rank has all numbers."""
    numbers = (x.detach() * 3).abs().long().clamp(max=count - 1)
    if whole and isinstance(x, hs.Sharded):
        numbers = numbers.full()
    batch, channels, depth, height, width = x.shape
    places = torch.arange(depth * height * width) % count
    if how == "all":
        y = torch.zeros(count, dtype=x.dtype).scatter_add(0, numbers.flatten(), x.flatten())
    elif how == "in place":
        y = torch.zeros(count, dtype=x.dtype)
        assert y.scatter_add_(0, numbers.flatten(), x.detach().flatten()) is y
        y = y * x.mean()
    elif how == "of channels in place":
        y = torch.ones(batch, channels, count, dtype=x.dtype)
        assert y.scatter_add_(2, numbers.flatten(2), x.detach().flatten(2)) is y
        y = y.index_add_(2, places, x.detach().flatten(2)) * x.mean()
    elif how == "of channels":
        y = torch.zeros(batch, channels, count, dtype=x.dtype)
        y = y.scatter_add(2, numbers.flatten(2), x.flatten(2))
    elif how == "of rows":
        y = torch.zeros(batch, channels, depth, count, dtype=x.dtype)
        y = y.scatter_add(3, numbers.flatten(3), x.flatten(3)).sum(2)
    elif how == "numbers":
        y = torch.zeros(batch, channels, count, dtype=x.dtype)
        y = y.scatter_add(
            2, numbers.flatten(2), torch.ones(numbers.shape, dtype=x.dtype).flatten(2)
        )
        y = y * x.mean((2, 3, 4))[..., None]
    elif how == "onto":
        y = x.mean((2, 3, 4))[..., None].expand(batch, channels, count)
        y = y.scatter_add(2, numbers.flatten(2), x.flatten(2))
    elif how == "voxels":
        y = torch.zeros(batch, channels, count, dtype=x.dtype)
        y = torch.index_add(y, 2, places, x.flatten(2), alpha=0.5)
    else:
        y = torch.zeros(batch, channels, depth, height, count, dtype=x.dtype)
        y = y.index_add(-1, places[:width], x)
    return y * torch.arange(1, count + 1)


BINNED = ["all", "in place", "of channels", "of rows", "numbers", "onto", "voxels", "lines"]
BINNED += ["of channels in place"]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_of_cut_values(ranks: int) -> None:
    all_axes: dict[int, list[dict[str, int]]] = {
        2: [{"width": 2}, {"data": 2}],
        3: [{"height": 3}],
        4: [{"data": 2, "depth": 2}, {"depth": 2, "width": 2}, {"height": 2, "width": 2}],
    }
    cases = [
        Example(axes, (3, 2, 5, 4, 6), options={"how": how, "count": count, "whole": whole})
        for axes in all_axes[ranks]
        for how in BINNED
        for count, whole in ((3, False), (6, True))
    ]
    run_ranks(ranks, compare, binned, cases)


def refused_sums() -> list[str]:
    x = hs.shard(torch.rand(3, 2, 4, 4, 4), hs.Grid(width=2))
    said = []
    for batch, count in ((3, 3), (1, 4)):
        with pytest.raises(hs.LayoutError) as caught:
            torch.zeros(batch, 2, 4, 4, 3).index_add(4, torch.arange(count) % 3, x)
        said.append(str(caught.value))
    return said


def refused_dtype(kind: torch.dtype, values: torch.dtype) -> None:
    x = hs.shard(torch.rand(1, 2, 4, 4, 4), hs.Grid(width=2)).to(values)
    torch.zeros(1, 2, 3, dtype=kind).scatter_add(2, (x * 0).long().flatten(2), x.flatten(2))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_sums_have_the_dtype_of_their_values(half: torch.dtype) -> None:
    for kinds in ((half, torch.float32), (torch.float32, half)):
        with pytest.raises(RuntimeError, match=r"equal to src\.dtype"):
            run_ranks(2, refused_dtype, *kinds)


def test_sums_that_do_not_fit_are_refused() -> None:
    """Torch's own words would come too late: the sums of one row would be added to all."""
    for positions, rows in run_ranks(2, refused_sums):
        assert "index_add along dim 4: there are more or fewer positions than values" in positions
        assert "index_add along dim 4: the other dims of the global shapes differ" in rows
        assert "dim 4 in 2 by width" in positions


def sum_in(kind: torch.dtype, large: float) -> float:
    values = torch.tensor([large, 1, 1, 0], dtype=kind).reshape(1, 1, 4, 1, 1)
    x = hs.shard(values, hs.Grid(depth=2)).flatten(2)
    sums = torch.zeros(1, 1, 2, dtype=kind).scatter_add(2, (x * 0).long(), x).full()
    assert sums.dtype == kind
    return sums[0, 0, 0].item()


@pytest.mark.parametrize(("half", "large"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_sums_in_half_precision_are_rounded_once(half: torch.dtype, large: float) -> None:
    """Of a number and one, which is lost, and one of the other rank, with which it is not."""
    assert run_ranks(2, sum_in, half, large) == [large + 2] * 2


def cut_positions_alone() -> None:
    """All else is ordinary, and so is the result."""
    at = torch.tensor([2, 0])
    positions = hs.shard(at, hs.Grid(data=2))
    for full in (torch.zeros(3, 4), torch.zeros(())):
        found, expected = (torch.index_fill(full, 0, p[:1] * 0, 1.5) for p in (positions, at))
        assert type(found) is torch.Tensor
        assert torch.equal(found, expected)
    rows = torch.zeros(3, 4)
    assert rows.index_add_(0, positions, torch.ones(2, 4)) is rows
    assert torch.equal(rows, torch.zeros(3, 4).index_add(0, at, torch.ones(2, 4)))


def test_cut_positions_alone() -> None:
    run_ranks(2, cut_positions_alone)


def counted_from_the_end() -> None:
    grid, full = hs.Grid(depth=2), torch.randn(1, 3, 4, 2, 2)
    at = torch.tensor([-1, 1, -3, 0]).view(1, 1, 4, 1, 1)  # below zero in both blocks
    x, positions = hs.shard(full, grid), hs.shard(at, grid)
    for index in (at, positions):
        found = torch.take_along_dim(x, index, 1)
        assert torch.equal(found.full(), torch.take_along_dim(full, at, 1))


def test_positions_counted_from_the_end() -> None:
    run_ranks(2, counted_from_the_end)
