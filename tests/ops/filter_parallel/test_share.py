"""Layers whose filters ranks share, against serial torch (tier: a few gloo ranks)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hyperslab as hs
from hyperslab.ops import convolution, filter_parallel
from hyperslab.ops.filter_parallel import filter_share
from tests.ranks import run_ranks
from tests.selection import by_rotation

GRIDS = [
    {"depth": 2},
    {"height": 3},
    {"width": 4},
    {"data": 2, "depth": 2},
    {"depth": 2, "height": 2},
]


class Net(nn.Module):
    """A cut layer, then such as are gathered: convolutions, of groups too, and linear layers.

    The filters fit no number of ranks; the last layer has fewer than there are ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv3d(2, 6, 3, padding=1)
        self.strided = nn.Conv3d(6, 10, 3, stride=2, bias=False)
        self.norm = nn.BatchNorm3d(10)
        self.deep = nn.Conv3d(10, 9, 3, padding=1)
        self.groups = nn.Conv3d(9, 18, 1, groups=9)
        self.wide = nn.Linear(18 * 8, 13)
        self.none = nn.Linear(13, 8, bias=False)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.strided(torch.relu(self.cut(x)))))
        y = self.groups(self.deep(y)).flatten(1)
        return self.last(torch.tanh(self.none(torch.relu(self.wide(y)))))


def build(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    return Net().to(dtype), torch.randn(2, 2, 5, 6, 5, dtype=dtype)


def shared_layers(model: nn.Module, run: Callable[[], Any]) -> tuple[Any, list[bool]]:
    """What ``run`` gives where every layer is worth it, and which layers' filters are shared."""
    found = []

    def spy(x: hs.Sharded, weight: torch.Tensor, *rest: Any) -> Any:
        result = filter_share(x, weight, *rest)
        found.append(result is not None)
        return result

    with (
        patch.object(filter_parallel, "SHARED_FROM", 0),
        patch.object(convolution, "filter_share", spy),
        patch("hyperslab.ops.linalg.filter_share", spy),
    ):
        return run(), found


def train(extents: dict[str, int], kernels: str, steps: int) -> list[torch.Tensor]:
    """Outputs and gradients of steps without an update: of both runs, the cut one's first."""
    grid = hs.Grid(**extents)
    serial, x = build()
    model, _ = build()
    hs.parallelize(model, grid, kernels=kernels)  # type: ignore[arg-type]

    def run() -> list[torch.Tensor]:
        results = []
        for _ in range(steps):
            model.zero_grad()
            y = model(hs.shard(x, grid)).full()
            y.square().sum().backward()
            results += [y.detach(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]
        return results

    found, shared = shared_layers(model, run)
    # The strided one is gathered before or cut; the last has one filter.
    assert shared[-3:] == [True, True, False], shared
    expected = []
    for _ in range(steps):
        serial.zero_grad()
        y = serial(x)
        y.square().sum().backward()
        expected += [y.detach(), *(p.grad.clone() for p in serial.parameters())]  # type: ignore[union-attr]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    return found


@pytest.mark.parametrize(("extents", "kernels"), by_rotation(GRIDS, ["fixed", "torch"]), ids=str)
def test_results_are_the_serial_ones_and_alike_on_all_ranks(
    extents: dict[str, int], kernels: str
) -> None:
    size = int(torch.tensor(list(extents.values())).prod())
    first, *others = run_ranks(size, train, extents, kernels, 2)
    assert all(all(map(torch.equal, first, other)) for other in others)


def differentiated_twice() -> None:
    """A gradient penalty: the gradients' gradients."""
    grid = hs.Grid(depth=2)
    serial, x = build()
    model, _ = build()
    serial.eval()
    hs.parallelize(model.eval(), grid)

    def penalty(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.requires_grad_()
        with net.no_sync() if net is model else patch.dict({}):  # type: ignore[operator]
            y = net(x)
            (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            total = gradient.square().sum()
            return list(torch.autograd.grad(total, list(net.parameters()), allow_unused=True))

    expected = penalty(serial, x.clone())
    found, shared = shared_layers(model, lambda: penalty(model, hs.shard(x, grid)))
    assert any(shared)
    for name, one, other in zip(dict(model.named_parameters()), found, expected, strict=True):
        if one is None or other is None:
            assert one is other, name
        else:
            dist.all_reduce(one)  # a rank's own part of the gradient of an ordinary number
            one /= grid.size
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_double_backward() -> None:
    run_ranks(2, differentiated_twice)


def half_precision() -> None:
    grid = hs.Grid(depth=2)
    serial, x = build(torch.float32)
    model, _ = build(torch.float32)
    hs.parallelize(model, grid)

    def run(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
        y = y.full() if isinstance(y, hs.Sharded) else y
        y.float().square().sum().backward()
        return [y.float().detach(), *(p.grad for p in net.parameters())]  # type: ignore[misc]

    expected = run(serial, x)
    found, shared = shared_layers(model, lambda: run(model, hs.shard(x, grid)))
    assert any(shared)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() <= 0.05 * other.norm() + 1e-3


def test_under_autocast() -> None:
    run_ranks(2, half_precision)


def only_inside_a_module() -> None:
    """One rank alone may go on with a tensor that is not cut: that needs no message."""
    grid = hs.Grid(depth=2)
    x = hs.shard(torch.randn(2, 3, 4, 4, 4), grid)
    whole = hs.gather(x, "depth")
    weight = torch.randn(8, 3, 1, 1, 1)

    def run() -> torch.Tensor | None:
        return torch.nn.functional.conv3d(whole, weight) if grid.is_main else None

    y, shared = shared_layers(nn.Identity(), run)
    if grid.is_main:
        assert y.local.shape == (2, 8, 4, 4, 4)
        assert shared == [False]


def test_elsewhere_ranks_may_go_their_ways() -> None:
    run_ranks(2, only_inside_a_module)


def behind_a_module() -> None:
    """A head that is not parallelised has its whole gradient on every rank, as one alone has."""
    grid = hs.Grid(depth=2)
    serial, x = build()
    model, _ = build()
    hs.parallelize(model, grid)
    torch.manual_seed(9)
    head = nn.Linear(1, 6).double()
    plain = nn.Linear(1, 6).double()
    plain.load_state_dict(head.state_dict())
    plain(serial(x)).square().sum().backward()

    def run() -> None:
        y = model(hs.shard(x, grid))
        if grid.is_main:
            with torch.no_grad():
                head(y)
        head(y).square().sum().backward()

    shared_layers(model, run)
    torch.testing.assert_close(head.weight.grad, plain.weight.grad)
    for one, other in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_head_of_the_users_is_not_shared() -> None:
    run_ranks(2, behind_a_module)
