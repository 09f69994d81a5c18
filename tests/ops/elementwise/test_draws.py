"""Random numbers in a cut tensor are the same on every grid (tier: a few gloo ranks)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hyperslab as hs
from tests.ranks import run_ranks

COVERS = {
    "elementwise": {"bernoulli", "bernoulli_", "uniform_", "normal", "normal_", "exponential_"}
}

VOLUME = (4, 2, 6, 5, 4)
GRIDS: list[dict[str, int]] = [
    {"data": 2, "depth": 2},
    {"depth": 2, "width": 2},
    {"data": 4},
]


def draws(x: Any) -> list[Any]:
    torch.manual_seed(5)
    chances = x.sigmoid()
    return [
        torch.bernoulli(chances),
        chances.bernoulli(0.3),
        torch.zeros_like(x).bernoulli_(0.7),
        torch.empty_like(x).bernoulli_(p=chances),
        torch.empty_like(x).uniform_(-2, 3),
        torch.empty_like(x).uniform_(),
        torch.empty_like(x).normal_(1, std=0.5),
        x.new_empty(x.shape).bernoulli_(),
        torch.empty_like(x).exponential_(2.0),
        torch.normal(x * 0 + 2, 0.25),
        torch.normal(0.0, torch.ones_like(x)),
        torch.normal(x * 0, x * 0 + 2),
    ]


def drawn(grid: dict[str, int] | None, shape: tuple[int, ...]) -> list[torch.Tensor]:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if grid is None:
        return draws(x)
    return [y.full() for y in draws(hs.shard(x, hs.Grid(**grid)))]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_volume_does_not_depend_on_the_grid(grid: dict[str, int]) -> None:
    (expected,) = run_ranks(1, drawn, {}, VOLUME)
    for found in run_ranks(4, drawn, grid, VOLUME):
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


def test_one_number_a_channel_is_torchs_own() -> None:
    """As dropped paths draw it; `shape` is also that of their mask."""
    for shape in ((4, 3, 1, 1, 1), (4, 6), (4,)):
        expected = drawn(None, shape)
        for found in run_ranks(2, drawn, {"data": 2}, shape):
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b)


def test_the_numbers_have_their_moments() -> None:
    (found,) = run_ranks(1, drawn, {}, (8, 4, 16, 16, 16))
    means = [y.mean().item() for y in found]
    spreads = [y.std().item() for y in found]
    assert means == pytest.approx([0.5, 0.3, 0.7, 0.5, 0.5, 0.5, 1.0, 0.5, 0.5, 2, 0, 0], abs=0.015)
    deviations = [0.5, 0.458, 0.458, 0.5, 5 / 12**0.5, 12**-0.5, 0.5, 0.5, 0.5, 0.25, 1, 2]
    assert spreads == pytest.approx(deviations, abs=0.015)


def gradients_of_normal() -> None:
    x = hs.shard(torch.rand(VOLUME), hs.Grid(depth=2)).requires_grad_()
    spread = torch.ones(2, 1, 1, 1, requires_grad=True)
    torch.normal(x, spread).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.full(), torch.zeros(VOLUME))
    assert spread.grad is not None
    assert torch.equal(spread.grad, torch.zeros_like(spread))


def test_gradients_of_normal_are_zero_as_torchs() -> None:
    run_ranks(2, gradients_of_normal)


def refused() -> None:
    x = hs.shard(torch.rand(VOLUME), hs.Grid(depth=2))
    generator = torch.Generator()
    for draw in (
        lambda: torch.bernoulli(x, generator=generator),
        lambda: x.uniform_(generator=generator),
        lambda: hs.tensor.RULES[torch.rand_like].run(x, generator=generator),  # torch 2.13 on
    ):
        with pytest.raises(hs.LayoutError, match="leave generator= out"):
            draw()
    for rate in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="it has to be above 0"):
            x.exponential_(rate)
    for deviation in (-x, -1.0):
        with pytest.raises(ValueError, match="a standard deviation is below 0"):
            torch.normal(x, deviation)
    with pytest.raises(ValueError, match="takes floating-point numbers"):
        x.round().int().exponential_()


def test_what_is_refused() -> None:
    run_ranks(2, refused)
