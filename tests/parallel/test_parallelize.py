"""What `parallelize` does to a network, in one step (tier: a few gloo ranks)."""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from tests.ops.serial import average, distance
from tests.ranks import run_ranks

COVERS = {"autograd": {"backward"}}

SMALL = [{"depth": 2}, {"data": 2, "height": 2}]


def size(axes: dict[str, int]) -> int:
    return math.prod(axes.values())


class Net(nn.Module):
    """Aligned and other windows, batch norm, pooling, replicated tail: what networks do."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.a = nn.Conv3d(2, 4, 3, padding=1, bias=False)  # norm would make its gradient zero
        self.norm = nn.BatchNorm3d(4)
        self.b = nn.Conv3d(4, 4, 4, stride=2, padding=1)
        self.pool = nn.AvgPool3d(3, 2, 1)
        self.head = nn.Linear(4, 3)
        self.how = how

    def body(self, x: Any) -> Any:
        return self.pool(F.leaky_relu(self.b(F.relu(self.norm(self.a(x))))))

    def forward(self, x: Any) -> Any:
        if self.how in ("plain", "channels_last"):
            y = self.body(x)
        else:
            y = checkpoint(self.body, x, use_reentrant=self.how == "reentrant")
        return self.head(y.mean((2, 3, 4)))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(4, 2, 9, 8, 10, generator=generator, dtype=torch.float64)
    return x, torch.randn(4, 3, generator=generator, dtype=torch.float64)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: b.clone().double() for name, b in model.named_buffers()}


def pair(
    axes: dict[str, int], how: str = "plain", dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, nn.Module, hs.Grid]:
    """The same network for plain torch and for the grid."""
    torch.manual_seed(2)
    serial = Net().to(dtype)
    parallel = Net(how).to(dtype)
    parallel.load_state_dict(serial.state_dict())
    grid = hs.Grid(**axes)
    return serial, hs.parallelize(parallel, grid), grid


def largest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(distance(found[name], value) for name, value in expected.items())


def one_step(axes: dict[str, int], how: str) -> float:
    serial, parallel, grid = pair(axes, how)
    x, y = data()
    z = x.clone()
    if how == "channels_last":
        parallel.to(memory_format=torch.channels_last_3d)
        z = x.to(memory_format=torch.channels_last_3d)
    elif how != "plain":
        serial.how = how
    x.requires_grad_()
    z.requires_grad_()
    F.mse_loss(serial(x), y).backward()
    F.mse_loss(parallel(hs.shard(z, grid)), y).backward()
    return max(largest(gradients(parallel), gradients(serial)), distance(z.grad, x.grad))


@pytest.mark.parametrize("how", ["plain", "reentrant", "non-reentrant", "channels_last"])
@pytest.mark.parametrize("axes", SMALL, ids=str)
def test_one_step(axes: dict[str, int], how: str) -> None:
    """Activation checkpointing by both ways runs batch norm twice: so does its reference."""
    assert max(run_ranks(size(axes), one_step, axes, how)) <= 1e-10


def asked_for(axes: dict[str, int]) -> float:
    """Parameters' gradients by torch.autograd.grad, and a penalty on them."""
    serial, parallel, grid = pair(axes)
    x, y = data()
    found = []
    for model, cut in ((serial, x), (parallel, hs.shard(x, grid))):
        loss = F.mse_loss(model(cut), y)
        asked = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(g.square().sum() for g in asked)).backward()
        found.append([*asked, *(p.grad for p in model.parameters())])
    return max(distance(b, a) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("axes", SMALL, ids=str)
def test_gradients_of_parameters_that_are_asked_for(axes: dict[str, int]) -> None:
    assert max(run_ranks(size(axes), asked_for, axes)) <= 1e-10


def accumulated(axes: dict[str, int], quietly: bool) -> float:
    """Two halves of a batch, then clipping; the first one without communication or with."""
    serial, parallel, grid = pair(axes)
    x, y = data()
    for model, cut in ((serial, lambda v: v), (parallel, lambda v: hs.shard(v, grid))):
        for half in (0, 1):
            quiet = quietly and half == 0 and model is parallel
            with model.no_sync() if quiet else contextlib.nullcontext():
                rows = slice(2 * half, 2 * half + 2)
                (F.mse_loss(model(cut(x[rows])), cut(y[rows])) / 2).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (serial, parallel)]
    return max(largest(gradients(parallel), gradients(serial)), distance(norms[1], norms[0]))


@pytest.mark.parametrize("quietly", [False, True])
@pytest.mark.parametrize("axes", SMALL, ids=str)
def test_accumulation_and_clipping(axes: dict[str, int], quietly: bool) -> None:
    assert max(run_ranks(size(axes), accumulated, axes, quietly)) <= 1e-10


def autocast(axes: dict[str, int]) -> tuple[float, float, bool]:
    """bfloat16: as far from float64 as the serial autocast run is, give or take."""
    serial, parallel, grid = pair(axes, dtype=torch.float32)
    exact = Net().double()
    exact.load_state_dict(serial.state_dict())
    x, y = (v.float() for v in data())
    F.mse_loss(exact(x.double()), y.double()).backward()
    outputs = []
    for model, cut in (
        (serial.float(), lambda v: v),
        (parallel.float(), lambda v: hs.shard(v, grid)),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(cut(x))
            loss = F.mse_loss(out.float(), cut(y))
        loss.backward()
        outputs.append(out)
    reference = torch.cat([p.grad.flatten() for p in exact.parameters()])
    errors = [
        distance(torch.cat([p.grad.flatten() for p in m.parameters()]).double(), reference)
        for m in (serial, parallel)
    ]
    return errors[0], errors[1], outputs[0].dtype == outputs[1].dtype


@pytest.mark.parametrize("axes", SMALL, ids=str)
def test_autocast(axes: dict[str, int]) -> None:
    for serial, parallel, same_type in run_ranks(size(axes), autocast, axes):
        assert same_type
        assert parallel <= 1.5 * serial + 1e-3
        assert serial < 0.1


def states() -> None:
    """Equal at the start whatever the ranks began with; keys as before; once only."""
    grid = hs.Grid(depth=2)
    torch.manual_seed(grid.rank)
    model = Net()
    model.head.bias.requires_grad_(False)
    with torch.no_grad():
        model.norm.running_mean.normal_()
    before = list(model.state_dict())
    mine = [v.clone().double() for v in model.state_dict().values()]
    assert hs.parallelize(model, grid) is model
    assert list(model.state_dict()) == before
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in Net().named_parameters()
    ]
    for value, own in zip(model.state_dict().values(), mine, strict=True):
        mean = average(value.double())
        assert torch.equal(mean, value.double())
        assert grid.rank or torch.equal(value.double(), own)
    fresh = Net()
    fresh.load_state_dict(model.state_dict())
    with pytest.raises(hs.LayoutError, match="parallelised already"):
        hs.parallelize(model, grid)
    with pytest.raises(hs.LayoutError, match="use one of grid, replica"):
        hs.parallelize(Net(), grid, batch_norm="none")


def test_state() -> None:
    run_ranks(2, states)


def test_alone() -> None:
    """On one rank it is the module as it was, with a context that does nothing."""
    model, (x, y) = hs.parallelize(Net().double(), hs.Grid()), data()
    with model.no_sync():
        F.mse_loss(model(hs.shard(x, hs.Grid())), y).backward()
    assert model.head.weight.grad is not None
    with pytest.raises(hs.LayoutError, match="parallelised already"):
        hs.parallelize(model, hs.Grid())


class Half(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(1, 2, 3)

    def forward(self, x: Any) -> Any:
        return self.used(x)


def unused() -> float:
    grid, model = hs.Grid(depth=2), Half().double()
    serial = Half().double()
    serial.load_state_dict(model.state_dict())
    hs.parallelize(model, grid, find_unused_parameters=True)
    x = torch.randn(2, 1, 6, 4, 4, dtype=torch.float64)
    for _ in range(2):
        serial.zero_grad()
        model.zero_grad()
        serial(x).square().mean().backward()
        model(hs.shard(x, grid)).square().mean().backward()
    return distance(model.used.weight.grad, serial.used.weight.grad)


def test_unused_parameters() -> None:
    assert max(run_ranks(2, unused)) <= 1e-12


@dataclass
class Sample:
    image: torch.Tensor
    others: dict[str, torch.Tensor]


class OfSamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm3d(2)

    def forward(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(sample.image), self.norm(sample.others["mask"])


def in_a_dataclass() -> None:
    grid, full = hs.Grid(data=2), torch.randn(4, 2, 3, 4, 5)
    net = hs.parallelize(OfSamples(), grid, batch_norm="replica")
    x = hs.shard(full, grid)
    sample, policy = Sample(x, {"mask": x * 1}), x.policy
    for found in net(sample):
        torch.testing.assert_close(found.local, nn.BatchNorm3d(2)(x.local))
    assert sample.image.policy is policy, "the caller's tensors have their own options again"


def test_options_hold_for_what_a_dataclass_brings() -> None:
    run_ranks(2, in_a_dataclass)


def refused_backward() -> None:
    x = hs.shard(torch.randn(2, 2, 4, requires_grad=True), hs.Grid(width=2))
    with pytest.raises(RuntimeError, match="the global shapes of an output"):
        torch.autograd.backward(x, x.local)  # which only re-entrant checkpointing does


def test_autograd_backward_outside_a_backward_pass() -> None:
    run_ranks(2, refused_backward)


def test_a_scripted_part_is_one_clear_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to give it up
        scripted = torch.jit.script(nn.ReLU())
    with pytest.raises(hs.LayoutError, match=r"1 was made by torch\.jit\.script"):
        hs.parallelize(nn.Sequential(nn.Conv3d(1, 1, 1), scripted), hs.Grid())


def lazy() -> str:
    model = nn.Sequential(nn.LazyConv3d(2, 3), nn.LazyBatchNorm3d())
    with pytest.raises(hs.LayoutError) as caught:
        hs.parallelize(model, hs.Grid(depth=2))
    return str(caught.value)


def test_parameters_that_are_not_made_yet_are_one_clear_error() -> None:
    for words in run_ranks(2, lazy):
        assert words.startswith("6 parameters and buffers of Sequential have no shape before")
        assert "call the module once, on a small volume" in words
