"""Square brackets equal the serial ones, reading and writing (tier: a few gloo ranks)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {"indexing": {"__getitem__", "__setitem__"}, "value": {"__index__"}}


def read(x: Any, *, index: Any, seed: int) -> Any:
    return recut(x * 2, seed)[index]


def write(x: Any, value: torch.Tensor, *, index: Any, seed: int, cut: bool) -> Any:
    """A value that broadcasts to the part, an ordinary one or a cut one."""
    y = recut(x * 2, seed)
    if cut and isinstance(x, hs.Sharded):
        value = hs.shard(value, hs.Grid()) if x.grid.size == 1 else as_cut(x, value)
    y[index] = value
    return y * y


def as_cut(x: hs.Sharded, value: torch.Tensor) -> Any:
    """An ordinary tensor as a cut one, of which every rank happens to hold all."""
    whole = hs.geometry.Partition.whole(value.shape)
    return hs.Sharded.from_local(value, whole, x.grid)


@st.composite
def items(draw: st.DrawFn, extent: int, whole: bool) -> Any:
    kind = draw(st.sampled_from(["int", "slice", "slice", "slice", "all"]))
    if whole and draw(st.integers(0, 4)) == 0:
        return draw(
            st.sampled_from([[0], [extent - 1, 0, 0], torch.tensor([0, -1]), np.array([0])])
        )
    if kind == "int":
        value = draw(st.integers(-extent, extent - 1))
        return draw(st.sampled_from([value, value, torch.tensor(value), np.int64(value)]))
    if kind == "all":
        return slice(None)
    bound = st.one_of(st.none(), st.integers(-extent - 1, extent + 1))
    return slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1, 2, 3])))


@st.composite
def subscripts(draw: st.DrawFn, ranks: int, write: bool) -> Example:
    n = draw(st.sampled_from([0, 1, 2, 3, 3]))
    grid = draw(grids(ranks))
    ways = [grid["data"], 1, *(parts_of(grid, n) if n else ())]
    shape = tuple(draw(st.integers(low, low + 5)) for low in ways)
    index: list[Any] = []
    for extent, cut in zip(shape, ways, strict=True):
        listed = any(isinstance(i, list | torch.Tensor | np.ndarray) for i in index)
        index.append(draw(items(extent, not listed and (cut == 1 or not write))))
    some = draw(st.integers(0, len(index)))
    if draw(st.booleans()):
        index = [*index[:some], ..., *index[draw(st.integers(some, len(index))) :]]
    else:
        index = index[:some]
    if not write and draw(st.booleans()):
        index.insert(draw(st.integers(0, len(index))), None)
    given: Any = tuple(index) if len(index) != 1 or draw(st.booleans()) else index[0]
    options = {"index": given, "seed": draw(st.integers(0, 5))}
    weights: tuple[tuple[int, ...], ...] = ()
    if write:
        part = torch.empty(shape)[given].shape
        value = [e if draw(st.booleans()) else 1 for e in part][draw(st.integers(0, len(part))) :]
        weights = (tuple(value),)
        options["cut"] = draw(st.booleans())
    return Example(
        grid=grid,
        shape=shape,
        weights=weights,
        options=options,
        dtype=draw(dtypes),
        channels_last=n > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_reading(ranks: int) -> None:
    run_ranks(ranks, compare, read, draw_examples(subscripts(ranks, False), 28))


@pytest.mark.parametrize("ranks", RANKS)
def test_any_writing(ranks: int) -> None:
    run_ranks(ranks, compare, write, draw_examples(subscripts(ranks, True), 28))


def beside() -> None:
    """Masks, tables, iteration, no-grad mode, integers; a view's base changes."""
    grid, full = hs.Grid(depth=2, data=2), torch.randn(4, 3, 6, 4, 4)
    x, y = hs.shard(full.clone(), grid), full.clone()
    for z in (x, y):
        z[z > 1] = 0.5
        z[z < -1] = torch.tensor(-0.5)
        z[:, [2, 0]] = 3.0
        z[:, 1, 2:5][..., 0] += 1
        z[:, :, 1:5] *= 2
        z[1:, :, ::2, 1:] = z[1:, :, 1::2, 1:] * 2
        several: Any = [slice(1, 3), [2, 0]]  # a list of more than numbers is several indices
        z[several] = z[[..., slice(0, 1), None]].amax() * 2
    assert torch.equal(x.full(), y)
    mask = torch.tensor([True, False, True])
    assert torch.equal(x[:, mask].full(), y[:, mask])
    labels, table = torch.randint(0, 5, (4, 6, 4, 4)), torch.randn(5, 2)
    cut = hs.shard(labels, grid, channels=False)
    assert torch.equal(table[cut].full(), table[labels])
    for part, expected in zip(x, y, strict=True):
        assert torch.equal(part.full(), expected)
    assert torch.equal(x[:, None, :, 1:3].full(), y[:, None, :, 1:3])
    assert x[:, :, 3:3].shape == (4, 3, 0, 4, 4)
    with torch.no_grad():
        assert torch.equal(x[..., 1:5, :].full(), y[..., 1:5, :])


def test_beside() -> None:
    run_ranks(4, beside)


def by_tables(x: Any) -> list[Any]:
    """Positions in several dims at once, in their place or in front, and tables of several dims."""
    table, row = torch.tensor([[2, 0], [1, -1]]), torch.tensor([0, 3])
    pairs = torch.arange(2)[:, None]
    rows = x.sum((2, 3))  # equal on all ranks of a replica
    chosen = rows.topk(2, 1).indices
    return [
        x[:, table],
        x[pairs, table],
        x[[1, 0], :, 1:5, row],
        x[None, :, [2, 1], ..., row],
        x[0, [2, 1], ::2, table],
        x.flatten(2)[pairs, table, row],
        x[:, chosen[0]] if x.shape[0] == 2 else x,
        x[:, chosen[0, 1]],
        x[..., 1:, chosen[1, 0], None],
        x[chosen[0, 0] % 2],
        x[:, [2, 0, 1][chosen[0, 0]]],
        x.flatten(2).transpose(1, 2)[torch.arange(2)[:, None], chosen],
        x[torch.tensor([[True, False, True], [False, True, False]])],
        rows[rows > 0],
        scaled_where(rows * 1, rows > 0),
        routed(x.sum(2).transpose(1, 2).reshape(-1, 3)),
    ]


def routed(tokens: Any) -> Any:
    """Every token goes through one of two layers, as those of a mixture of experts do."""
    y = torch.zeros_like(tokens)
    best = tokens.argmax(-1)
    for expert, where in ((2, best == 0), (3, best > 0)):
        y[where] = tokens[where] * expert
    return y


def scaled_where(x: Any, mask: torch.Tensor) -> Any:
    """Values read and written by a mask, as ``x[mask] *= 2`` does."""
    x[mask] *= 2
    return x


def by_cut_tables(x: Any) -> list[Any]:
    """Positions that lie on any rank, and masks of dims that are cut."""
    i, j, k = torch.tensor([[0, 1, 1], [2, -1, 5], [3, 0, -4]])
    return [
        x[i, :, j, k],
        x[i, j.clamp(-1, 1), j, k],
        x[:, :, j],
        x[..., j[None], k[:, None]],
        x[:, :, [0, 5], [1, 1]],
        x[0, :, j, None, 1:3],
        (x > 0)[:, 1, j, k].double() * x.mean(),
        x[:, :, torch.arange(24).view(6, 4) % 3 > 0],
        x[:, torch.arange(18).view(3, 6) % 4 > 0],
    ]


def written_by_tables(x: Any) -> list[Any]:
    """Voxels at given places, pairs in front, a matrix of positions, one list along a cut dim."""
    i, j, k = torch.tensor([[0, 1, 1], [2, -1, 5], [3, 0, -4]])
    values = torch.arange(9, dtype=x.dtype).view(3, 3)
    ys = [x * 1 for _ in range(7)]
    ys[0][i, :, j, k] = values
    ys[1][i, 0, j, k] = 0.5
    ys[2][:, :, j] = values[0][:, None]
    ys[3][..., j[:, None], k[None]] = x[:, :, :3, :3]
    ys[4][:, :, [0, 5], [1, 1]] *= 3
    ys[5][..., [4, 1], 1:3] = x[:, :, 2:4, :2]
    ys[6][i, i, j, k] = x.mean((0, 2, 3))
    return ys


def by_cut_positions(x: Any) -> list[Any]:
    """Positions that are cut themselves: orders, the best of each sample, displaced voxels."""
    order = x.flatten().argsort()
    best = x.mean((2, 3)).argmax(1)
    moved = ((x[:, 0] * 3).long() + torch.arange(6)[:, None]).clamp(0, 5)
    line = torch.arange(4)
    samples = torch.arange(2)
    return [
        x.flatten()[order].square().cumsum(0) / 144,
        x[samples, best],
        x[samples[:, None], best[:, None], :, line[1:3]],
        x[samples[:, None, None], :, moved, line],
        x[:, :, moved, 1],
        torch.linspace(0, 1, 6, dtype=x.dtype)[moved] * x[:, 1],
    ]


def compare_tables(read: Callable[[Any], list[Any]], **axes: int) -> float:
    full = torch.randn(2, 3, 6, 4, dtype=torch.float64, requires_grad=True)
    leaf = full.detach().clone().requires_grad_()
    found = read(hs.shard(leaf, hs.Grid(**axes)) * 1)
    expected = read(full * 1)
    far = [float((a.full() - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    sum(y.full().square().sum() for y in found).backward()
    sum(y.square().sum() for y in expected).backward()
    assert leaf.grad is not None
    assert full.grad is not None
    return max(*far, float((leaf.grad - full.grad).abs().max()))


def test_tables_of_positions() -> None:
    assert max(run_ranks(2, in_height)) < 1e-12


def in_height() -> float:
    return compare_tables(by_tables, height=2)


@pytest.mark.parametrize("axes", [(1, 2, 2), (2, 2, 1), (1, 1, 4)], ids=str)
@pytest.mark.parametrize("read", [by_cut_tables, by_cut_positions, written_by_tables])
def test_positions_along_cut_dims(read: Callable[[Any], list[Any]], axes: tuple[int, ...]) -> None:
    assert max(run_ranks(4, over_cuts, read, axes)) < 1e-12


def over_cuts(read: Callable[[Any], list[Any]], axes: tuple[int, ...]) -> float:
    data, height, width = axes
    return compare_tables(read, data=data, height=height, width=width)


def kept_of_each(x: Any) -> list[Any]:
    """Some tokens of every sample, as masked autoencoders keep them."""
    each, kept = torch.arange(3)[:, None], torch.tensor([[3, 0], [1, 1], [-1, 2]])
    tokens = x.flatten(2).transpose(1, 2)
    return [
        tokens[each, kept],
        tokens[each, torch.tensor([[2, 0]])],
        tokens[each[:, 0], kept[:, 1], kept[:, 0].abs() - 1],
        x[each, :, kept.abs()],
    ]


def compare_kept() -> float:
    full = torch.randn(3, 3, 6, 4, dtype=torch.float64, requires_grad=True)
    leaf = full.detach().clone().requires_grad_()
    found = kept_of_each(hs.shard(leaf, hs.Grid(data=2)) * 1)
    expected = kept_of_each(full * 1)
    assert all(y.partition.axes == ("data",) for y in found)
    far = [float((a.full() - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    sum(y.square().sum() for y in found).backward()
    sum(y.square().sum() for y in expected).backward()
    assert leaf.grad is not None
    assert full.grad is not None
    return max(*far, float((leaf.grad - full.grad).abs().max()))


def test_some_of_each_sample() -> None:
    assert max(run_ranks(2, compare_kept)) < 1e-12


def shuffled() -> Any:
    """Samples in another order, as mixing samples up takes them, are cut as they were."""
    x = hs.shard(torch.arange(4.0 * 6).view(4, 1, 6, 1, 1), hs.Grid(data=2, depth=2))
    order = torch.tensor([2, 0, 3, 1])
    assert x[order].partition == x.partition
    assert x[as_cut(x, order)].partition == x.partition  # such as ``scores.argsort()``
    assert x[[3], :, 1:].partition.axes == ("depth",)
    x[:, :, 1:3] = x[as_cut(x, order), :, 1:3]
    return x.full()[:, 0, :, 0, 0].tolist()


def test_samples_are_taken_from_each_other() -> None:
    rows = torch.arange(24.0).view(4, 6)
    rows[:, 1:3] = rows[[2, 0, 3, 1], 1:3]
    assert run_ranks(4, shuffled) == [rows.tolist()] * 4


def refused(case: str) -> None:
    grid = hs.Grid(depth=2)
    x = hs.shard(torch.randn(2, 3, 6, 4, 4), grid)
    labels = hs.shard(torch.zeros(2, 3, 6, 4, 4, dtype=torch.int64), grid)
    ordinary = torch.zeros(2, 3, 6, 4, 4)
    {
        "cut index": lambda: x.__setitem__((slice(None), slice(None), labels), 1.0),
        "bool": lambda: x[True],
        "many": lambda: x[0, 0, 0, 0, 0, 0],
        "ordinary tuple": lambda: ordinary[0, labels],
        "cut value": lambda: ordinary.__setitem__(0, x),
        "new": lambda: x.__setitem__((0, None), 1.0),
        "copy": lambda: x.flatten(1).__setitem__((slice(None), 0), 1.0),
        "writing a copy": lambda: x[:, :, 4:].mT.add_(1),
    }[case]()


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("cut index", hs.UnsupportedOp, "a cut index goes alone"),
        ("bool", hs.UnsupportedOp, "a lone bool"),
        ("many", hs.UnsupportedOp, "6 indices for 5 dims"),
        ("ordinary tuple", hs.UnsupportedOp, "one cut tensor of integers"),
        ("cut value", hs.UnsupportedOp, "cannot be given a cut value"),
        ("new", hs.UnsupportedOp, "reshape the value"),
        ("copy", hs.LayoutError, "in place"),
        ("writing a copy", hs.LayoutError, "in place"),
    ],
)
def test_what_is_refused(case: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(2, refused, case)


def beyond() -> None:
    hs.shard(torch.randn(2, 3, 6, 4), hs.Grid(height=2))[:, [0, 3], [0, 1]]


def test_what_torch_refuses_too() -> None:
    x = hs.shard(torch.randn(2, 3), hs.Grid())
    with pytest.raises(IndexError, match="index 3 is out of bounds for dim 1 with size 3"):
        x[0, 3]
    with pytest.raises(IndexError, match=r"a mask \(1, 3\) for 2 x 3"):
        x[torch.ones(1, 3, dtype=torch.bool)] = 1.0
    with pytest.raises(IndexError, match=r"a mask \(1, 3\) for 2 x 3"):
        x[torch.ones(1, 3, dtype=torch.bool)]
    with pytest.raises(IndexError, match="a position is out of bounds for dim 1 with size 3"):
        run_ranks(2, beyond)
    with pytest.raises(ValueError, match="step must be greater than zero"):
        x[:, ::-1]
    with pytest.raises(ValueError, match="shape mismatch"):
        x[:, 1:] = torch.zeros(3)
