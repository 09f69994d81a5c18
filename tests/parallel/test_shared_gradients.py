"""Gradients that lie and are averaged in shared memory (tier: a few gloo ranks)."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hyperslab as hs
from hyperslab.comm import Shown, shared_buffers, shared_channels, shared_memory
from hyperslab.comm.shared_memory import MOST_OF_FREE_MEMORY
from hyperslab.ops import filter_parallel
from hyperslab.parallel.averaging import SharedGradients
from tests.ranks import fresh_groups, run_ranks

SIZES = (1, 5, 1000, 200_003)


def averages() -> list[torch.Tensor]:
    """Of small whole numbers, which are exact in every order, on sizes that no rank's share fits;
    then of others, whose bits all ranks must have alike."""
    grid = hs.Grid(data=dist.get_world_size())
    shared = shared_channels()
    assert shared is not None
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for count in SIZES:
            generator = torch.Generator().manual_seed(count)
            numbers = torch.randint(-9, 9, (grid.size, count), generator=generator) * grid.size
            buffers = shared_buffers(count * dtype.itemsize)
            assert buffers is not None
            parts = [buffer.view(dtype) for buffer in buffers]
            parts[grid.rank].copy_(numbers[grid.rank])
            shared.average_shown([Shown(parts, range(grid.size))], "a test", nbytes=parts[0].nbytes)
            assert torch.equal(parts[grid.rank].long(), numbers.sum(0) // grid.size)
    torch.manual_seed(grid.rank)
    buffers = shared_buffers(4 * SIZES[-1])
    assert buffers is not None
    parts = [buffer.view(torch.float32) for buffer in buffers]
    parts[grid.rank].normal_()
    shared.average_shown([Shown(parts, range(grid.size))], "a test", nbytes=parts[0].nbytes)
    return [parts[grid.rank].clone()]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_rank_has_the_same_average(ranks: int) -> None:
    (first,), *others = run_ranks(ranks, averages)
    assert all(torch.equal(first, other) for (other,) in others)


class Mixed(nn.Module):
    """Parameters of several types and memory formats, one of them used twice, one empty."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 5, 3, padding=1).to(memory_format=torch.channels_last_3d)
        self.scale64 = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.mix16 = nn.Parameter(torch.randn(7, 5).to(torch.bfloat16).t())
        self.none = nn.Parameter(torch.empty(0))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).mean((2, 3, 4)) * self.scale64.float() * self.scale64.float()
        return (y @ self.mix16.float()).sum() + self.none.sum()


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def accumulate(model: nn.Module, x: torch.Tensor, cut: bool) -> list[list[torch.Tensor]]:
    """Gradients after a step, after two more without zeroing, and after zeroing in both ways."""
    found = []
    grid = hs.Grid(depth=2) if cut else None
    if grid is not None:
        hs.parallelize(model, grid)

    def step() -> None:
        model(x if grid is None else hs.shard(x, grid)).backward()

    step()
    found.append(gradients_of(model))
    if grid is not None:
        with model.no_sync():  # type: ignore[operator]
            step()
    else:
        step()
    step()
    found.append(gradients_of(model))
    for to_none in (True, False):
        model.zero_grad(set_to_none=to_none)
        step()
        found.append(gradients_of(model))
    for p in model.parameters():
        if p.requires_grad:
            assert p.grad is not None
            assert p.grad.dtype == p.dtype
            assert p.grad.stride() == p.stride() or not p.numel()
    return found


def both_ways() -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Mixed()
    x = torch.randn(1, 3, 4, 5, 6)
    alone = Mixed()
    alone.load_state_dict(model.state_dict())
    expected = accumulate(alone, x, False)
    found = accumulate(model, x, True)
    assert isinstance(model.no_sync.__self__, SharedGradients)  # type: ignore[union-attr]
    for a, b in zip(expected, found, strict=True):
        for one, other in zip(a, b, strict=True):
            tolerance = 2e-2 if one.dtype == torch.bfloat16 else 1e-5
            assert torch.allclose(one, other, rtol=tolerance, atol=tolerance)
    return found


def test_gradients_of_several_types() -> None:
    first, second = run_ranks(2, both_ways)
    for a, b in zip(first, second, strict=True):
        assert all(map(torch.equal, a, b))


def mapped() -> int:
    """Bytes of files without a name that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if "hyperslab-" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ends)


def freed() -> tuple[int, int]:
    grid = hs.Grid(depth=2)
    gc.collect()  # what other tests left
    before = mapped()
    model = hs.parallelize(nn.Conv3d(8, 64, 5), grid)
    model(hs.shard(torch.randn(1, 8, 12, 6, 6), grid)).full().sum().backward()
    during = mapped()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    return during - before, mapped() - before


def test_the_memory_goes_with_the_module() -> None:
    for during, after in run_ranks(2, freed):
        assert during >= 2 * 4 * 8 * 64 * 125
        assert after == 0


def without_room() -> bool:
    """Where there is no room for the gradients DistributedDataParallel averages them."""
    grid = hs.Grid(data=2)
    shared_memory.MOST_OF_FREE_MEMORY = 0.0
    try:
        model = hs.parallelize(nn.Linear(3, 2), grid, ordinary_inputs="trust")
    finally:
        shared_memory.MOST_OF_FREE_MEMORY = MOST_OF_FREE_MEMORY
    model(torch.full((4, 3), grid.rank + 1.0)).sum().backward()
    assert model.weight.grad is not None
    right = torch.equal(model.weight.grad, torch.full((2, 3), 6.0))
    return right and isinstance(model.no_sync.__self__, DistributedDataParallel)  # type: ignore[union-attr]


def test_without_room_for_gradients() -> None:
    assert run_ranks(2, without_room) == [True] * 2
    fresh_groups()


class Deep(nn.Module):
    """Two layers that are not cut, of which ranks share the filters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 7)
        self.second = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x.mean((2, 3, 4))))).sum()


class Scaled(nn.Module):
    """A convolution times rows of a table, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 1, sparse=True, dtype=torch.float64)
        self.conv = nn.Conv3d(1, 2, 3, padding=1, dtype=torch.float64)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(x)
        return y * self.table(rows).sum()


def sparse() -> tuple[bool, list[torch.Tensor], list[torch.Tensor]]:
    """What table and filters get cut and serially."""
    grid = hs.Grid(depth=2)
    model = Scaled()
    serial = Scaled()
    serial.load_state_dict(model.state_dict())
    hs.parallelize(model, grid)
    x, rows = torch.rand(1, 1, 4, 4, 4, dtype=torch.float64), torch.tensor([1, 3])
    (model(hs.shard(x, grid), rows) ** 2).mean().backward()
    serial.load_state_dict(model.state_dict())
    (serial(x, rows) ** 2).mean().backward()
    found, expected = (
        [p.grad.to_dense() for p in each.parameters() if p.grad is not None]
        for each in (model, serial)
    )
    grad = model.table.weight.grad
    return grad is not None and grad.is_sparse, found, expected


def test_sparse_gradients() -> None:
    for is_sparse, found, expected in run_ranks(2, sparse):
        assert is_sparse
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def doubles(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def doubles_unseen(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.data.mul_(2)


def doubles_anew(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = 2 * parameter.grad


def hooks_of_one_rank(kind: str) -> None:
    """What a user does to a gradient on one rank alone must not mix up what the others do."""
    torch.manual_seed(1)
    grid = hs.Grid(depth=2)
    alone = Deep()
    model = Deep()
    model.load_state_dict(alone.state_dict())
    hs.parallelize(model, grid)
    x = torch.randn(1, 12, 4, 5, 6)
    kept: list[torch.Tensor] = []
    if grid.rank == 0 and kind == "keep":
        model.first.weight.register_hook(kept.append)
    if kind == "after":
        model.second.weight.register_post_accumulate_grad_hook(doubles)
        model.first.weight.register_post_accumulate_grad_hook(doubles_unseen)
        model.first.bias.register_post_accumulate_grad_hook(doubles_anew)
    if grid.rank == 0 and kind == "replace":
        model.first.weight.register_hook(torch.clone)
    with patch.object(filter_parallel, "SHARED_FROM", 0):
        for _ in range(3):
            model.zero_grad()
            model(hs.shard(x, grid)).backward()
    alone(x).backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        changed = kind == "after" and one is not model.second.bias
        torch.testing.assert_close(one.grad, other.grad * 2 if changed else other.grad)
    if kept:
        torch.testing.assert_close(kept[0], kept[-1])


@pytest.mark.parametrize("kind", ["none", "keep", "replace", "after"])
def test_a_hook_of_one_rank(kind: str) -> None:
    run_ranks(2, hooks_of_one_rank, kind)
