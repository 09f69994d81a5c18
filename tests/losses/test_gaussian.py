"""The Gaussian likelihood is torch's, on cut tensors too (tiers: no process; a few ranks)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

losses = hs.losses


def by_torch(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean by torch's own distribution of a precision that is filled number by number."""
    count = target.shape[1]
    total = torch.zeros((), dtype=torch.float64)
    for row, y in zip(prediction, target, strict=True):
        mean, raw, rest = row[:count], row[count : 2 * count], iter(row[2 * count :])
        scale = torch.exp(10 * torch.tanh(raw / 10))
        factor = [[torch.zeros((), dtype=torch.float64)] * count for _ in range(count)]
        for j in range(count):
            factor[j][j] = scale[j]
            for i in range(j + 1, count):
                factor[i][j] = next(rest) * scale[j]
        lower = torch.stack([torch.stack(line) for line in factor])
        normal = torch.distributions.MultivariateNormal(mean, precision_matrix=lower @ lower.T)
        total = total - normal.log_prob(y)
    return total / len(target)


def example(samples: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples + 10 * count)
    shape = (samples, count * (count + 3) // 2)
    prediction = torch.randn(shape, generator=generator, dtype=torch.float64)
    target = torch.randn(samples, count, generator=generator, dtype=torch.float64)
    return prediction.to(dtype), target.to(dtype)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_loss_and_gradients_are_those_of_torchs_distribution(count: int) -> None:
    prediction, target = (t.requires_grad_() for t in example(5, count, torch.float64))
    found = losses.gaussian_loss(prediction, target)
    expected = by_torch(prediction, target)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    own = torch.autograd.grad(found, (prediction, target))
    others = torch.autograd.grad(expected, (prediction, target))
    torch.testing.assert_close(own, others, rtol=1e-10, atol=1e-10)
    each = losses.gaussian_loss(prediction, target, reduction="none")
    assert each.shape == (5,)
    torch.testing.assert_close(each.mean(), found)
    torch.testing.assert_close(losses.gaussian_loss(prediction, target, reduction="sum") / 5, found)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_moments_are_those_that_the_loss_means(count: int) -> None:
    prediction, target = example(3, count, torch.float64)
    mean, covariance = losses.gaussian_moments(prediction)
    normal = torch.distributions.MultivariateNormal(mean, covariance)
    expected = losses.gaussian_loss(prediction, target, reduction="none")
    torch.testing.assert_close(-normal.log_prob(target), expected, rtol=1e-9, atol=1e-9)


def test_zeros_are_a_unit_covariance() -> None:
    mean, covariance = losses.gaussian_moments(torch.zeros(2, losses.gaussian_outputs(4)))
    assert torch.equal(mean, torch.zeros(2, 4))
    assert torch.equal(covariance, torch.eye(4).expand(2, 4, 4))
    loss = losses.gaussian_loss(torch.zeros(2, 14), torch.ones(2, 4))
    assert float(loss) == pytest.approx(2 + 2 * math.log(2 * math.pi))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [-300.0, 300.0])
def test_nothing_overflows_and_half_precision_is_computed_in_float32(
    dtype: torch.dtype, size: float
) -> None:
    prediction = torch.full((2, 14), size, dtype=dtype, requires_grad=True)
    target = torch.zeros(2, 4)
    loss = losses.gaussian_loss(prediction, target)
    assert loss.dtype == torch.float32
    loss.backward()
    assert prediction.grad is not None
    assert loss.isfinite()
    assert prediction.grad.isfinite().all() or dtype == torch.float16
    mean, covariance = losses.gaussian_moments(torch.full((1, 5), size))
    assert covariance.diagonal(dim1=1, dim2=2).gt(0).all()
    assert mean.dtype == covariance.dtype == torch.float32


def test_ten_thousand_draws_give_the_covariance_back() -> None:
    """The least of the loss over one prediction for all samples is their mean and covariance."""
    root = np.array([[0.5, 0, 0], [0.3, 0.2, 0], [-0.1, 0.05, 0.4]])
    draws = np.random.default_rng(0).standard_normal((10_000, 3)) @ root.T + [0.1, -0.2, 0.3]
    target = torch.from_numpy(draws)
    prediction = torch.zeros(1, 9, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([prediction], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Any:
        optimizer.zero_grad()
        loss = losses.gaussian_loss(prediction.expand(len(target), -1), target)
        loss.backward()
        return loss

    optimizer.step(closure)
    mean, covariance = losses.gaussian_moments(prediction.detach())
    np.testing.assert_allclose(mean[0], draws.mean(0), atol=1e-4)
    np.testing.assert_allclose(covariance[0], np.cov(draws.T, bias=True), atol=1e-4)


@pytest.mark.parametrize(
    ("prediction", "target"),
    [((5, 4), (5, 4)), ((5, 14), (4, 4)), ((5, 14), (5,)), ((5, 0), (5, 0))],
)
def test_other_shapes_are_refused(prediction: tuple[int, ...], target: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"Gaussian of targets .* takes predictions .*gaussian"):
        losses.gaussian_loss(torch.zeros(prediction), torch.zeros(target))


def gaussian(x: Any, *, count: int, whole: bool, reduction: str) -> Any:
    """The loss of a network that averages over space; targets are cut, or whole on every rank."""
    generator = torch.Generator().manual_seed(7)
    target = torch.randn(x.shape[0], count, generator=generator).to(x.dtype)
    if isinstance(x, hs.Sharded) and not whole:
        target = hs.shard(target, x.grid)
    return losses.gaussian_loss(x.mean((2, 3, 4)), target, reduction=reduction)


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    grid = draw(grids(ranks))
    count = draw(st.integers(1, 4))
    extents = [draw(st.integers(p, p + 3)) for p in parts_of(grid, 3)]
    return Example(
        grid=grid,
        # Fewer samples than replicas, and no multiple of them, are among these.
        shape=(draw(st.integers(1, 7)), losses.gaussian_outputs(count), *extents),
        dtype=draw(dtypes),
        channels_last=False,
        options={
            "count": count,
            "whole": draw(st.booleans()),
            "reduction": draw(st.sampled_from(["mean", "mean", "sum", "none"])),
        },
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_cut_predictions_have_the_serial_loss_and_gradients(ranks: int) -> None:
    run_ranks(ranks, compare, gaussian, draw_examples(examples(ranks), 24))
