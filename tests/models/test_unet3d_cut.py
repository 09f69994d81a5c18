"""The 3D U-Net on cut volumes whose extents fit neither grid nor strides (tier: a few ranks)."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import hyperslab as hs
from tests.ranks import run_ranks
from tests.selection import by_rotation

GRIDS = [{"depth": 2}, {"depth": 2, "height": 2}, {"data": 2, "width": 2}, {"depth": 3}]


def differences(grid_of: dict[str, int], extents: tuple[int, ...]) -> tuple[float, float]:
    """Relative errors of the logits and of the worst gradient, float64."""
    grid = hs.Grid(**grid_of)
    plain = hs.models.UNet3D(in_channels=2, channels=2, levels=2).double()
    cut = hs.parallelize(copy.deepcopy(plain), grid)
    x, weight = (torch.randn(2, c, *extents, dtype=torch.float64) for c in (2, 3))
    expected = plain(x)
    (expected * weight).mean().backward()
    y = cut(hs.shard(x, grid))
    (y * hs.shard(weight, grid)).mean().backward()
    return error(y.full(), expected), worst_gradient(cut, plain)


def worst_gradient(cut: torch.nn.Module, plain: torch.nn.Module) -> float:
    pairs = zip(cut.parameters(), plain.parameters(), strict=True)
    return max(error(p.grad, q.grad) for p, q in pairs)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.norm(got - expected) / torch.linalg.norm(expected))


@pytest.mark.parametrize(
    ("grid", "extents"), by_rotation(GRIDS, [(13, 10, 11), (7, 5, 9), (8, 8, 8)]), ids=str
)
def test_logits_and_gradients_are_the_serial_ones(
    grid: dict[str, int], extents: tuple[int, ...]
) -> None:
    for logits, gradient in run_ranks(math.prod(grid.values()), differences, grid, extents):
        assert logits < 1e-10
        assert gradient < 1e-10
