"""Parts of cut tensors by position (tier: no process, then a few gloo ranks)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import hyperslab as hs
from hyperslab.geometry import Cut
from hyperslab.ops.views import Span
from tests.ops.recut import recut
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {
    "views": {
        "narrow",
        "select",
        "unbind",
        "split",
        "split_with_sizes",
        "chunk",
        "tensor_split",
        "vsplit",
        "hsplit",
        "dsplit",
    }
}

WAYS = ["narrow", "narrow", "select", "split", "sizes", "chunk", "tensor_split", "unbind"]


def test_a_span_follows_every_cut() -> None:
    """Each chosen element stays in the shard in which it is."""
    extent = 7
    for start, step, first, second in itertools.product(range(8), (1, 2, 3), range(8), range(8)):
        if first > second:
            continue
        cut = Cut("depth", (0, first, second, extent))
        chosen = range(start, extent, step)
        span = Span(start, len(chosen), step)
        for out, (lo, hi) in zip(span.follow(cut).intervals, cut.intervals, strict=True):
            assert list(chosen[slice(*out)]) == [i for i in chosen if lo <= i < hi]
            reads = span.reads(out)
            assert list(range(extent)[span.slice(out, 0)]) == list(chosen[slice(*out)])
            assert reads[0] == reads[1] or (reads[0], reads[1] - 1) == (
                chosen[out[0]],
                chosen[out[1] - 1],
            )


def part(x: Any, *, how: str, args: tuple[Any, ...], method: bool, seed: int) -> Any:
    """Twice the input, so that a view does not hide an error; a list of parts becomes one."""
    y = recut(x * 2, seed)
    found = getattr(y, how)(*args) if method else getattr(torch, how)(y, *args)
    if isinstance(found, torch.Tensor):
        return found
    flat = [(y.full() if isinstance(y, hs.Sharded) else y).flatten() for y in found]
    return torch.cat([torch.tensor([float(len(y)) for y in flat], dtype=x.dtype), *flat])


@st.composite
def parts(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([0, 1, 2, 3, 3]))
    grid = draw(grids(ranks))
    least = [grid["data"], 1, *(parts_of(grid, n) if n else ())]
    shape = tuple(draw(st.integers(low, low + 5)) for low in least)
    d = draw(st.integers(0, len(shape) - 1))
    dim, extent = draw(st.sampled_from([d, d - len(shape)])), shape[d]
    how = draw(st.sampled_from(WAYS))
    args: tuple[Any, ...] = (dim,)
    if how == "narrow":
        start = draw(st.integers(0, extent - 1))
        args = (dim, start, draw(st.integers(1, extent - start)))
    elif how == "select":
        args = (dim, draw(st.integers(-extent, extent - 1)))
    elif how == "sizes":
        bounds = sorted(draw(st.lists(st.integers(0, extent), max_size=3)))
        sizes = [b - a for a, b in itertools.pairwise([0, *bounds, extent])]
        how, args = draw(
            st.sampled_from([("split", (sizes, dim)), ("split_with_sizes", (sizes, dim))])
        )
    elif how in ("split", "chunk"):
        args = (draw(st.integers(1, extent + 1)), dim)
    elif how == "tensor_split":
        bounds = draw(st.lists(st.integers(-extent, extent + 1), max_size=3))
        args = (draw(st.sampled_from([draw(st.integers(1, extent + 1)), bounds])), dim)
    return Example(
        grid=grid,
        shape=shape,
        options={
            "how": how,
            "args": args,
            "method": draw(st.booleans()),
            "seed": draw(st.integers(0, 5)),
        },
        dtype=draw(dtypes),
        channels_last=n > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_part(ranks: int) -> None:
    run_ranks(ranks, compare, part, draw_examples(parts(ranks), 28))


def test_splits_along_a_named_dim() -> None:
    cases = [
        Example(
            grid={"data": 2, "depth": 2},
            shape=(4, 4, 5, 4),
            options={"how": how, "args": (2,), "method": method, "seed": 0},
        )
        for how, method in itertools.product(("vsplit", "hsplit", "dsplit"), (False, True))
    ]
    run_ranks(4, compare, part, [c for c in cases if c.options["how"] != "dsplit"])
    odd = [Example(**{**vars(c), "options": {**c.options, "args": ([1, 3],)}}) for c in cases]
    run_ranks(4, compare, part, odd)


def in_place() -> None:
    """Where serial torch has a view, a change reaches its base, or is refused."""
    grid, full = hs.Grid(depth=2), torch.randn(2, 4, 6, 4, 4, dtype=torch.float64)
    leaf, serial = full.clone().requires_grad_(), full.clone().requires_grad_()
    x, y = hs.shard(leaf, grid) * 1, serial * 1
    for base in (x, y):
        base.narrow(1, 1, 2).mul_(3)
        base.narrow(2, 1, 4).add_(1)  # across the cut
        base.select(1, 3).mul_(2)
        base.select(0, 1).mul_(0.5)
    assert torch.equal(x.full(), y)
    (x.full() ** 2).sum().backward()
    (y**2).sum().backward()
    assert torch.allclose(leaf.grad, serial.grad)
    for copied in (x.narrow(2, 0, 3), x.select(2, 1), x.narrow(2, 4, 2).squeeze(0)):
        with pytest.raises(hs.LayoutError, match="in place"):
            copied.mul_(2)
    assert x.chunk(2, 1)[0].local.data_ptr() == x.local.data_ptr()


def test_in_place() -> None:
    run_ranks(2, in_place)


def changed_base(how: str) -> None:
    """A copy does not follow its base as serial torch's view does: using it then is refused."""
    base = hs.shard(torch.randn(2, 2, 4, 3), hs.Grid(height=2)) * 1
    part = {
        "view": lambda: base.narrow(1, 0, 1),
        "narrow": lambda: base.narrow(2, 0, 2),
        "view of a copy": lambda: base.select(2, 3)[:, :1].transpose(0, 1),
        "copy of a copy": lambda: base.narrow(2, 2, 2).narrow(2, 0, 1),
        "flatten": lambda: base.flatten(1),
    }[how]()
    doubled, before = part * 2, part.full()
    base.select(1, 0).mul_(2)  # through another view
    assert torch.equal(doubled.full(), 2 * before)
    found = part + 0
    assert torch.equal(found.full(), 2 * before)


def test_a_view_follows_its_base() -> None:
    run_ranks(2, changed_base, "view")


@pytest.mark.parametrize("how", ["narrow", "view of a copy", "copy of a copy", "flatten"])
def test_a_changed_base(how: str) -> None:
    with pytest.raises(hs.LayoutError, match="was changed in place since"):
        run_ranks(2, changed_base, how)


def stay_and_move() -> list[Any]:
    x = hs.shard(torch.arange(24.0).view(2, 1, 12), hs.Grid(width=3))
    inside, left = x.narrow(2, 2, 8), x.narrow(2, 0, 5)
    few = x.narrow(2, 0, 2)
    return [
        inside.partition.cuts[2].bounds,
        inside.local.data_ptr() == x.local[:, :, 2 * (x.grid.rank == 0) :].data_ptr(),
        left.partition.cuts[2].bounds,
        few.partition.cuts[2],
    ]


def test_elements_stay_on_their_ranks_where_they_can() -> None:
    for found in run_ranks(3, stay_and_move):
        assert found == [(0, 2, 6, 8), True, (0, 2, 4, 5), None]


def of_nothing() -> None:
    """Ranks agree on whether an empty tensor is contiguous, as it is serially."""
    x = hs.shard(torch.randn(3, 2, 5), hs.Grid(data=3), channels=False)
    assert x[:, 0:0].is_contiguous()
    assert x.mT[:, :, 1:1].is_contiguous()


def test_an_empty_tensor_is_contiguous() -> None:
    run_ranks(3, of_nothing)


def split_at_cut_indices() -> None:
    grid, full, ends = hs.Grid(data=2), torch.randn(2, 3, 4), torch.tensor([1, 2])
    parts = torch.tensor_split(hs.shard(full, grid), hs.shard(ends, grid), 1)
    for part, expected in zip(parts, torch.tensor_split(full, ends, 1), strict=True):
        assert torch.equal(part.full(), expected)
    parts = torch.tensor_split(full, hs.shard(ends, grid), 1)
    assert all(map(torch.equal, parts, torch.tensor_split(full, ends, 1)))


def test_indices_that_are_cut_themselves() -> None:
    run_ranks(2, split_at_cut_indices)


def test_what_is_refused() -> None:
    x = hs.shard(torch.randn(2, 3), hs.Grid())
    for wrong in (
        lambda: x.narrow(1, 2, 2),
        lambda: x.narrow(1, -4, 1),
        lambda: x.select(1, 3),
        lambda: x.narrow(2, 0, 1),
    ):
        with pytest.raises(IndexError):
            wrong()
    for words, refused in {
        r"^split of 2 x 3 \(not cut\): split_with_sizes expects .* 3": lambda: x.split([1, 1], 1),
        r"^split of 2 x 3 \(not cut\): split_size can only be 0": lambda: x.split(0),
        r"^chunk of 2 x 3 \(not cut\): .* greater than 0": lambda: x.chunk(0),
        r"^dsplit of 2 x 3 \(not cut\): .* at least 3 dimension": lambda: x.dsplit(2),
    }.items():
        with pytest.raises(hs.LayoutError, match=words):
            refused()


def by_name(x: Any, weight: torch.Tensor) -> Any:
    """Arguments by the names that torch has for them, one for each kind."""
    parts = [
        *x.split(split_size=2, dim=2),
        *torch.tensor_split(x, indices=(1, 3), dim=2),
        *x.tensor_split(sections=2, dim=2),
        *torch.dsplit(x, indices=[2]),
    ]
    means = x.mean((2, 3, 4))
    products = torch.addmm(means, mat1=means, mat2=weight)
    return torch.cat(parts, 2) * products[..., None, None, None]


def test_arguments_by_name() -> None:
    grid = {"data": 2, "depth": 2, "height": 1, "width": 1}
    run_ranks(4, compare, by_name, [Example(grid=grid, shape=(2, 3, 5, 4, 4), weights=((3, 3),))])
