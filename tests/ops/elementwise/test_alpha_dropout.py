"""Alpha dropout: torch's own where one number is drawn a channel, else the same on every grid
(tier: a few gloo ranks).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from tests.ranks import run_ranks

COVERS = {"elementwise": {"alpha_dropout", "feature_alpha_dropout"}}

GRIDS = ({"depth": 2}, {"data": 2, "height": 2})


def dropped(
    axes: dict[str, int] | None, function: Any, shape: tuple[int, ...], inplace: bool, p: float
) -> list[torch.Tensor]:
    """The result and the gradient of its square."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    y = x * 2 if axes is None else hs.shard(x, hs.Grid(**axes)) * 2
    torch.manual_seed(3)
    y = function(y, p, True, inplace)
    assert torch.equal(function(x, p, False), x)
    whole = y.full() if isinstance(y, hs.Sharded) else y
    whole.square().sum().backward()
    assert x.grad is not None
    return [whole.detach(), x.grad]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (F.alpha_dropout, (4, 50)),
        (F.alpha_dropout, (4, 30, 1, 1, 1)),
        (F.feature_alpha_dropout, (4, 20, 5, 4, 3)),
    ],
)
def test_torchs_own(function: Any, shape: tuple[int, ...], inplace: bool) -> None:
    expected = dropped(None, function, shape, inplace, 0.3)
    for axes in ({"data": 2}, {"data": 2, "depth": 2}):
        if shape[2:] == (1, 1, 1) and "depth" in axes:
            continue
        for found in run_ranks(
            math.prod(axes.values()), dropped, axes, function, shape, inplace, 0.3
        ):
            for a, b in zip(found, expected, strict=True):
                assert torch.allclose(a, b, rtol=1e-12)


def test_a_volume_does_not_depend_on_the_grid() -> None:
    shape = (4, 2, 6, 5, 4)
    (expected,) = run_ranks(1, dropped, {}, F.alpha_dropout, shape, False, 0.4)
    for axes in GRIDS:
        ranks = math.prod(axes.values())
        for found in run_ranks(ranks, dropped, axes, F.alpha_dropout, shape, False, 0.4):
            for a, b in zip(found, expected, strict=True):
                assert torch.allclose(a, b, rtol=1e-12)


def moments(p: float) -> list[float]:
    torch.manual_seed(1)
    x = hs.shard(torch.randn(2, 4, 32, 32, 32), hs.Grid(width=2))
    y = F.alpha_dropout(x, p, True).full()
    return [y.mean().item(), y.std().item()]


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_mean_and_variance_stay(p: float) -> None:
    assert run_ranks(2, moments, p)[0] == pytest.approx([0.0, 1.0], abs=0.01)


def extremes() -> None:
    x = hs.shard(torch.ones(2, 3, 4, 4, 4), hs.Grid(depth=2))
    for function in (F.alpha_dropout, F.feature_alpha_dropout):
        assert torch.equal(function(x, 1.0, True).full(), function(torch.ones(x.shape), 1.0, True))
        assert torch.equal(function(x, 0.0, True).full(), torch.ones(x.shape))


def test_all_or_nothing() -> None:
    run_ranks(2, extremes)


def refused() -> None:
    x = hs.shard(torch.ones(2, 3, 4, 4, 4), hs.Grid(depth=2))
    with pytest.raises(ValueError, match="takes floating-point numbers"):
        F.alpha_dropout(x.int(), 0.5, True)
    with pytest.raises(ValueError, match="has no channels"):
        F.feature_alpha_dropout(hs.shard(torch.ones(4), hs.Grid(data=2)), 0.5, True)


def test_what_is_refused() -> None:
    run_ranks(2, refused)
