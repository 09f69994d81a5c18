"""New tensors in the likeness of a cut one (tier: no process, then a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hyperslab as hs
from tests.ranks import run_ranks

COVERS = {
    "elementwise": {
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "new_tensor",
        "empty_like",
        "rand_like",
        "randn_like",
    },
}

SHAPE = (3, 2, 6, 5, 4)


def new_tensors() -> None:
    grid = hs.Grid(data=2, depth=2)
    full = torch.randn(SHAPE, dtype=torch.float64)
    x = hs.shard(full, grid)
    for make in (
        lambda t: t.new_zeros(3, 7, 6, 5, 9),
        lambda t: t.new_ones((3, 7, 6, 5, 1), dtype=torch.int32),
        lambda t: t.new_full(t.shape, 2.5),
        lambda t: t.new_full(size=(3, 1, 6, 5, 4), fill_value=True, dtype=torch.bool),
        lambda t: t.new_zeros(size=t.size()),
    ):
        found, expected = make(x), make(full)
        assert isinstance(found, hs.Sharded)
        assert found.partition.axes == ("data", "depth")
        assert torch.equal(found.full(), expected)
        assert found.dtype == expected.dtype
    for make in (
        lambda t: t.new_zeros(3, 2),
        lambda t: t.new_ones(()),
        lambda t: t.new_full((3, 2, 7, 5, 4), 1.5),
        lambda t: t.new_tensor([[1, 2]]),
    ):
        found, expected = make(x), make(full)
        assert type(found) is torch.Tensor
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype
    assert x.new_empty(SHAPE).shape == torch.empty_like(x).shape == SHAPE
    assert torch.empty_like(x, dtype=torch.int8).dtype == torch.int8


def test_new_tensors() -> None:
    run_ranks(4, new_tensors)


def leaves() -> None:
    x = hs.shard(torch.randn(2, 2, 6, 4, 4), hs.Grid(depth=2))
    leaf = x.new_zeros(x.shape, requires_grad=True)
    assert leaf.is_leaf
    (leaf * x).full().sum().backward()
    assert torch.allclose(leaf.grad.full(), x.full())
    buffer = x.new_zeros(2, 4, 6, 4, 4)
    buffer[:, :2] = x
    buffer[:, 2:] = x * 2
    assert torch.equal(buffer.full(), torch.cat([x.full(), 2 * x.full()], 1))


def test_new_leaves_and_buffers() -> None:
    run_ranks(2, leaves)


def draws(grid: dict[str, int], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    torch.manual_seed(5)
    x = hs.shard(torch.zeros(shape, dtype=dtype), hs.Grid(**grid))
    found = [torch.rand_like(x), torch.randn_like(x), torch.randn_like(x, requires_grad=True)]
    return [(y * 1).full().detach() for y in found]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_draws_do_not_depend_on_the_grid(dtype: torch.dtype) -> None:
    serial = run_ranks(1, draws, {}, SHAPE, dtype)[0]
    for grid in ({"data": 2, "depth": 2}, {"depth": 2, "width": 2}):
        for found in run_ranks(4, draws, grid, SHAPE, dtype):
            assert all(torch.equal(a, b) for a, b in zip(found, serial, strict=True))
    uniform, normal, again = serial
    assert uniform.dtype == normal.dtype == dtype
    assert 0 <= uniform.min() < uniform.max() < 1
    assert not torch.equal(normal, again)


def test_draws_without_space_are_torchs_own() -> None:
    found = run_ranks(2, draws, {"data": 2}, (5, 3), torch.float64)
    torch.manual_seed(5)
    expected = [torch.rand(5, 3, dtype=torch.float64)]
    expected += [torch.randn(5, 3, dtype=torch.float64) for _ in range(2)]
    for rank in found:
        assert all(torch.equal(a, b) for a, b in zip(rank, expected, strict=True))


def test_the_moments_of_the_draws() -> None:
    """Within five standard errors of those of the uniform and of the normal distribution."""
    uniform, normal, _ = draws({}, (1, 1, 40, 50, 50), torch.float32)
    n = uniform.numel()
    for power, mean in ((1, 1 / 2), (2, 1 / 3), (4, 1 / 5)):
        error = (1 / (2 * power + 1) - mean**2) ** 0.5 / n**0.5
        assert abs((uniform**power).mean() - mean) < 5 * error
    for power, mean, square in ((1, 0, 1), (2, 1, 3), (3, 0, 15), (4, 3, 105)):
        error = ((square - mean**2) / n) ** 0.5
        assert abs((normal**power).mean() - mean) < 5 * error


class Latent(nn.Module):
    """The sampling layer of a variational autoencoder."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_variance = x.flatten(1).chunk(2, 1)
        return mean + torch.randn_like(mean) * (0.5 * log_variance).exp()


def sample() -> torch.Tensor:
    x = hs.shard(torch.randn(4, 2, 4, 4, 4), hs.Grid(data=2, depth=2))
    return Latent()(x).full()


def test_sampling_in_a_network() -> None:
    torch.manual_seed(0)
    expected = Latent()(torch.randn(4, 2, 4, 4, 4))
    for found in run_ranks(4, sample):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.randint_like(x, 5),
        lambda x: x.cauchy_(),
        lambda x: x.log_normal_(),
        lambda x: x.random_(),
    ],
    ids=["randint_like", "cauchy_", "log_normal_", "random_"],
)
def test_other_draws_are_refused(draw: Any) -> None:
    with pytest.raises(hs.UnsupportedOp, match="has no rule for a cut tensor"):
        draw(hs.shard(torch.zeros(SHAPE), hs.Grid()))


def test_new_tensor_of_a_cut_one_is_refused() -> None:
    x = hs.shard(torch.zeros(SHAPE), hs.Grid())
    with pytest.raises(hs.LayoutError, match=r"use x.clone\(\).detach\(\)"):
        x.new_tensor(x)
