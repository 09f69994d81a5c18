"""Triangles, diagonals and dims of extent 1 equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import Example, compare
from tests.ranks import run_ranks

COVERS = {
    "views": {"tril", "triu", "diag", "diag_embed", "atleast_1d", "atleast_2d", "atleast_3d"},
}


def triangles(x: Any, *, offset: int, seed: int) -> Any:
    y = recut(x * 2, seed)
    return torch.tril(y, offset) + 2 * y.triu(offset + 1)


def diagonals(x: Any, *, offset: int, dims: tuple[int, int], seed: int) -> Any:
    return torch.diag_embed(recut(x * 2, seed), offset, *dims)


@pytest.mark.parametrize(
    "grid", [{"depth": 2, "width": 2}, {"height": 4}, {"data": 2, "height": 2}]
)
def test_equal_to_serial(grid: dict[str, int]) -> None:
    shape = (2, 3, 5, 6, 4)
    offsets = [(-7, 1), (-2, 0), (0, 3), (1, 0), (3, 5), (9, 0)]
    options = [{"offset": offset, "seed": seed} for offset, seed in offsets]
    run_ranks(4, compare, triangles, [Example(grid, shape, options=one) for one in options])
    dims = [(-2, -1), (0, 1), (-1, 2), (1, 4)]
    examples = [
        Example(grid, shape, options={**one, "dims": pair})
        for one, pair in zip(options, dims, strict=False)
    ]
    run_ranks(4, compare, diagonals, examples)


def more_dims() -> None:
    full = torch.randn(6)
    x = hs.shard(full, hs.Grid(data=2))
    for more in (torch.atleast_1d, torch.atleast_2d, torch.atleast_3d):
        assert torch.equal(more(x).full(), more(full))
        for found, expected in zip(more(x, full), more(full, full), strict=True):
            assert torch.equal(found.full() if isinstance(found, hs.Sharded) else found, expected)
    views = torch.atleast_2d(x)
    views.add_(1)
    assert torch.equal(x.full(), full + 1)


def test_tensors_get_more_dims() -> None:
    run_ranks(2, more_dims)


def matrices() -> None:
    full = torch.randn(3, 5)
    x = hs.shard(full, hs.Grid(depth=2))
    for offset in (-4, -2, 0, 3, 6):
        assert torch.equal(torch.diag(x, offset).full(), torch.diag(full, offset))
        assert torch.equal((x[0] * 2).diag(offset).full(), (full[0] * 2).diag(offset))
    x.diag(1).mul_(2)
    full.diag(1).mul_(2)
    assert torch.equal(x.full(), full)
    volume = hs.shard(torch.zeros(2, 1, 5, 3, 3, dtype=torch.bfloat16), hs.Grid(depth=2))
    assert (torch.numel(volume), volume.nbytes) == (90, 180)
    with pytest.raises(hs.LayoutError, match="diag takes one dim or two"):
        torch.diag(volume)
    with pytest.raises(hs.LayoutError, match="diagonal of"):
        torch.diag(hs.shard(torch.zeros(4, 4), hs.Grid(data=2)))


def test_matrices_and_their_diagonals() -> None:
    run_ranks(2, matrices)
