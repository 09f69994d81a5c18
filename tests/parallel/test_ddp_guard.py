"""What would leave a gradient partial is refused (tier: a few gloo ranks)."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hyperslab as hs
from hyperslab.util.torch_internals import accumulation_hooks
from tests.ranks import run_ranks


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv3d(2, 1, 3, padding=1))


def freeze_then_unfreeze(x: Any, grid: hs.Grid) -> None:
    model = network()
    model[0].requires_grad_(False)
    hs.parallelize(model, grid)
    model[0].requires_grad_(True)
    model(x)


def nothing_then_something(x: Any, grid: hs.Grid) -> None:
    model = hs.parallelize(network().requires_grad_(False), grid)
    model.requires_grad_(True)
    model(x)


def freeze_a_part_later(x: Any, grid: hs.Grid) -> None:
    model = hs.parallelize(network(), grid)
    model[0].requires_grad_(False)
    model(x)


def replace_a_layer(x: Any, grid: hs.Grid) -> None:
    model = hs.parallelize(network(), grid)
    model[2] = nn.Conv3d(2, 1, 1)
    model(x)


def convert_later(x: Any, grid: hs.Grid) -> None:
    hs.parallelize(network(), grid).double()(x)


def back_twice(x: Any, grid: hs.Grid) -> None:
    model = hs.parallelize(network(), grid)  # dropped, it might be collected with its guard
    loss = model(x).mean()
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards_two_backwards(x: Any, grid: hs.Grid) -> None:
    model = hs.parallelize(network(), grid)
    a, b = model(x).mean(), model(2 * x).mean()
    a.backward()
    b.backward()


def deepcopy(x: Any, grid: hs.Grid) -> None:
    copy.deepcopy(hs.parallelize(network(), grid))


REFUSED = [
    freeze_then_unfreeze,
    nothing_then_something,
    freeze_a_part_later,
    replace_a_layer,
    convert_later,
    back_twice,
    two_forwards_two_backwards,
    deepcopy,
]


def refuse(way: Callable[..., None]) -> None:
    grid = hs.Grid(depth=2)
    with pytest.raises(hs.LayoutError):
        way(hs.shard(torch.randn(1, 1, 6, 4, 4), grid), grid)


@pytest.mark.parametrize("way", REFUSED, ids=lambda way: way.__name__)
def test_it_is_refused(way: Callable[..., None]) -> None:
    run_ranks(2, refuse, way)


def gradients(axes: dict[str, int] | None) -> list[torch.Tensor]:
    """Two forwards and one backward, then one with all frozen in between; plain without axes."""
    torch.manual_seed(1)
    full = torch.randn(2, 1, 6, 5, 4)
    model, x = network(), full
    if axes is not None:
        grid = hs.Grid(**axes)
        hs.parallelize(model, grid)
        x = hs.shard(full, grid)
    (model(x).mean() + model(2 * x).square().mean()).backward()
    model.requires_grad_(False)
    model(x)
    model.requires_grad_(True)
    model(3 * x).mean().backward()
    return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


def test_what_is_allowed_is_exact() -> None:
    expected = gradients(None)
    for found in run_ranks(4, gradients, {"data": 2, "depth": 2}):
        for got, want in zip(found, expected, strict=True):
            assert torch.allclose(got, want, atol=1e-6)


def train_bare(model: nn.Module, x: Any, grid: hs.Grid) -> None:
    for _ in range(2):
        model(x).square().mean().backward()


def only_forward(model: nn.Module, x: Any, grid: hs.Grid) -> None:
    model(x)


def parallelise_in_time(model: nn.Module, x: Any, grid: hs.Grid) -> None:
    model(x)
    train_bare(hs.parallelize(model, grid), x, grid)


def train_a_head(model: nn.Module, x: Any, grid: hs.Grid) -> None:
    """Behind a parallelised module."""
    head = nn.Conv3d(1, 1, 1)
    head(hs.parallelize(model, grid)(x)).square().mean().backward()


def train_a_head_on_features(model: nn.Module, x: Any, grid: hs.Grid) -> None:
    """Which are not cut, so that every rank has all of the head's gradient."""
    nn.Linear(1, 1)(hs.parallelize(model, grid)(x).mean((2, 3, 4))).square().mean().backward()


def train_in_ddp(model: nn.Module, x: Any, grid: hs.Grid) -> None:
    train_bare(DistributedDataParallel(model), x, grid)


def warned(way: Callable[..., None]) -> list[str]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("hyperslab").addHandler(handler)
    try:
        grid = hs.Grid(depth=2)
        model = network()
        way(model, hs.shard(torch.ones(1, 1, 6, 4, 4), grid), grid)
        if way is train_bare:  # once is enough
            assert not any(map(accumulation_hooks, model.parameters()))
    finally:
        logging.getLogger("hyperslab").removeHandler(handler)
    return [record.getMessage() for record in records if "not parallelised" in record.getMessage()]


@pytest.mark.parametrize(
    ("way", "times"),
    [
        (train_bare, 1),
        (train_a_head, 1),
        (train_a_head_on_features, 0),
        (only_forward, 0),
        (parallelise_in_time, 0),
        (train_in_ddp, 0),
    ],
)
def test_training_without_parallelize_is_warned_of(way: Callable[..., None], times: int) -> None:
    first, second = run_ranks(2, warned, way)
    assert (len(first), len(second)) == (times, 0)  # the main rank logs


def beginnings() -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks that start in different random states, with an expanded and a strided buffer."""
    grid = hs.Grid(depth=2)
    torch.manual_seed(grid.rank)
    model = network()
    model.register_buffer("ramp", torch.arange(3.0).view(3, 1, 1).expand(3, 400, 400))
    model.register_buffer("turned", torch.randn(2, 3).T)
    hs.parallelize(model, grid)
    return torch.rand(3), model.get_buffer("turned")


def test_ranks_begin_alike() -> None:
    first, second = run_ranks(2, beginnings)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def freed() -> bool:
    grid = hs.Grid(depth=2)
    model = hs.parallelize(nn.Conv3d(1, 1, 3, padding=1), grid)
    model(hs.shard(torch.randn(1, 1, 8, 4, 4), grid)).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    return gone() is None


def test_a_module_and_its_process_group_are_freed() -> None:
    assert run_ranks(2, freed) == [True, True]
