"""Sums over ranks and their adjoint (tier: a few gloo ranks)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hyperslab as hs
from hyperslab.comm import all_reduce_sum
from hyperslab.comm.collectives import stack_ranks
from tests.ranks import run_ranks

GRIDS = [{"depth": 3}, {"data": 2, "depth": 2}, {"data": 2, "depth": 3}, {"depth": 2, "height": 4}]


def value(rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + seed)
    return torch.randn(2, 3, generator=generator, dtype=torch.float64)


def check(axes: dict[str, int], over: tuple[str, ...]) -> None:
    grid = hs.Grid(**axes)
    group = grid.group(over)
    mates = [
        rank
        for rank in range(grid.size)
        if all(grid.coords_of(rank)[a] == grid.coords[a] for a in grid.extents if a not in over)
    ]
    x = value(grid.rank, 0).T.requires_grad_()  # not contiguous
    y = all_reduce_sum(x, group, "test")
    assert torch.allclose(y, sum(value(rank, 0).T for rank in mates), atol=1e-14)
    w = value(grid.rank, 1).T
    (xt,) = torch.autograd.grad(y, x, w)
    both = torch.stack([(y * w).sum(), (x * xt).sum()]).detach()
    dist.all_reduce(both)
    assert abs(both[0] - both[1]) < 1e-12
    if group is not None:
        assert list(group.ranks) == mates
    else:
        assert mates == [grid.rank]
    assert torch.equal(x, value(grid.rank, 0).T)


@pytest.mark.parametrize(
    "over", [("depth",), ("data",), ("data", "depth"), ("height", "depth"), ()]
)
@pytest.mark.parametrize("axes", GRIDS, ids=str)
def test_sum_adjoint_and_members(axes: dict[str, int], over: tuple[str, ...]) -> None:
    run_ranks(int(torch.tensor(list(axes.values())).prod()), check, axes, over)


def twice() -> float:
    """The sum can be differentiated twice: its adjoint is itself."""
    grid = hs.Grid(depth=2)
    x = torch.tensor(float(grid.rank + 1), requires_grad=True)
    y = all_reduce_sum(x**2, grid.group(("depth",)), "test")
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    return second.item()


def test_second_derivative() -> None:
    assert run_ranks(2, twice) == [4.0, 4.0]


def stacked(axes: dict[str, int], over: tuple[str, ...]) -> None:
    """Everybody's blocks in the order of ranks, of any type, and the adjoint identity."""
    grid = hs.Grid(**axes)
    group = grid.group(over)
    mates = list(group.ranks) if group is not None else [grid.rank]
    x = value(grid.rank, 0).requires_grad_()
    y = stack_ranks(x, group, "test")
    assert torch.equal(y, torch.stack([value(rank, 0) for rank in mates]))
    w = torch.stack([value(grid.rank, 1 + rank) for rank in mates])
    (y * w).sum().backward()
    assert x.grad is not None
    both = torch.stack([(y * w).sum(), (x * x.grad).sum()]).detach()
    dist.all_reduce(both)
    assert abs(both[0] - both[1]) < 1e-12
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16):
        small = torch.tensor([grid.rank, 3]).to(dtype)
        found = stack_ranks(small, group, "test")
        assert torch.equal(found, torch.tensor([[rank, 3] for rank in mates]).to(dtype))


@pytest.mark.parametrize("over", [("depth",), ("data", "depth"), ()])
@pytest.mark.parametrize("axes", GRIDS, ids=str)
def test_stacks_and_their_adjoint(axes: dict[str, int], over: tuple[str, ...]) -> None:
    run_ranks(int(torch.tensor(list(axes.values())).prod()), stacked, axes, over)
