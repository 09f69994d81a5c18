"""One rank's tensor in boxes on all of them (tier: a few gloo ranks)."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

import hyperslab as hs
from hyperslab.comm.communicator import GroupCommunicator
from tests.ranks import RankError, run_ranks

SHAPE = (3, 2, 5, 7, 6)
GRIDS: list[dict[str, int]] = [
    {},
    {"depth": 2},
    {"height": 3},
    {"data": 3},
    {"depth": 2, "width": 2},
    {"data": 2, "height": 2},
    {"data": 4},  # more replicas than samples: the batch is not cut
]
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64]


def whole(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 90, shape, generator=generator).to(dtype)


def laid_out(x: torch.Tensor, how: str) -> torch.Tensor:
    if how == "channels last":
        return x.contiguous(memory_format=torch.channels_last_3d)
    if how == "gaps":
        return torch.stack([x, x], -1)[..., 1]
    if how == "reversed":
        return x.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0)
    return x


def scattered(axes: dict[str, int], src: int, dtype: torch.dtype, how: str) -> None:
    grid = hs.Grid(**axes)
    held = laid_out(whole(dtype), how) if grid.rank == src else None
    x = hs.scatter(held, grid, src=src)
    expected = hs.shard(laid_out(whole(dtype), how), grid)
    assert x.partition == expected.partition
    assert x.dtype == dtype
    assert torch.equal(x.local, expected.local)
    assert not x.requires_grad
    if how != "gaps":
        assert x.local.stride() == laid_out(torch.empty(x.local.shape, dtype=dtype), how).stride()


@pytest.mark.parametrize("axes", GRIDS, ids=str)
def test_every_rank_gets_its_box(axes: dict[str, int]) -> None:
    ranks = math.prod(axes.values())
    run_ranks(ranks, scattered, axes, ranks - 1, torch.float32, "contiguous")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types(dtype: torch.dtype) -> None:
    run_ranks(2, scattered, {"depth": 2}, 0, dtype, "contiguous")


@pytest.mark.parametrize("how", ["channels last", "gaps", "reversed"])
def test_memory_formats(how: str) -> None:
    run_ranks(3, scattered, {"height": 3}, 1, torch.float32, how)


def without_channels() -> None:
    grid = hs.Grid(depth=2)
    labels = whole(torch.int64)[:, 0]
    y = hs.scatter(labels if grid.is_main else "anything", grid, channels=False)  # type: ignore[arg-type]
    assert torch.equal(y.full(), labels)
    assert torch.equal(y.local, hs.shard(labels, grid, channels=False).local)
    numbers = hs.scatter(torch.arange(6.0).view(3, 2) if grid.is_main else None, grid)
    assert torch.equal(numbers.local, torch.arange(6.0).view(3, 2))


def test_labels_and_numbers() -> None:
    run_ranks(2, without_channels)


def by_replica(src: int) -> None:
    grid = hs.Grid(data=2, width=2)
    parts = [whole(), whole().flip(0) + 1]
    mine = parts[grid.coords["data"]] if grid.coords["width"] == src else None
    x = hs.scatter(mine, grid, src=src, batch="replica")
    assert x.shape == (6, *SHAPE[1:])
    assert torch.equal(x.full(), torch.cat(parts))


@pytest.mark.parametrize("src", [0, 1])
def test_a_rank_of_each_replica_holds_its_part(src: int) -> None:
    run_ranks(4, by_replica, src)


def gradient(axes: dict[str, int], batch: Any) -> None:
    grid = hs.Grid(**axes)
    of_replica = grid.size // grid.data if batch == "replica" else grid.size
    src = of_replica - 1
    holds = grid.rank % of_replica == src
    x = whole(torch.float64).requires_grad_() if holds else None
    y = hs.scatter(x, grid, src=src, batch=batch)
    assert y.requires_grad
    weight = hs.shard(torch.sin(torch.arange(math.prod(y.shape))).view(y.shape).double(), grid)
    (weight * y * y).sum().backward()
    if x is not None:
        n = len(x) * (grid.coords["data"] if batch == "replica" else 0)
        expected = 2 * weight.full()[n : n + len(x)] * x
        torch.testing.assert_close(x.grad, expected)
    else:
        weight.full()


@pytest.mark.parametrize("axes", GRIDS, ids=str)
def test_the_gradient_is_the_serial_one(axes: dict[str, int]) -> None:
    run_ranks(math.prod(axes.values()), gradient, axes, "global")


def test_the_gradient_of_a_replicas_part() -> None:
    run_ranks(4, gradient, {"data": 2, "depth": 2}, "replica")


def counted() -> int:
    """Bytes that the source sends in messages, but for the announcement."""
    grid = hs.Grid(depth=2)
    sent = []
    before = GroupCommunicator.exchange

    def exchange(self: Any, sends: Any, receives: Any, what: str) -> Any:
        sent.extend(piece.nbytes for _, piece in sends)
        return before(self, sends, receives, what)

    try:
        GroupCommunicator.exchange = exchange  # type: ignore[method-assign]
        hs.scatter(whole() if grid.is_main else None, grid)
    finally:
        GroupCommunicator.exchange = before  # type: ignore[method-assign]
    return sum(sent)


def test_only_boxes_travel() -> None:
    assert run_ranks(2, counted) == [4 * 3 * 2 * 2 * 7 * 6, 0]  # planes 3 and 4 of five


def refused(case: str) -> str:
    grid = hs.Grid(depth=2)
    x: Any = whole() if grid.rank == 1 else None
    src = 1
    channels = True
    if case == "nothing":
        src = 0
    elif case == "cut":
        x = hs.shard(whole(), grid)
    elif case == "thin":
        x = whole(shape=(1, 1, 1, 4, 4)) if grid.rank == 1 else None
    elif case == "no such rank":
        src = 2
    elif case == "two sources":
        src = grid.rank
    elif case == "channels":
        channels = grid.is_main
    with pytest.raises(hs.LayoutError) as caught:
        hs.scatter(x, grid, src=src, channels=channels)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("nothing", "what rank 0 hands in is no tensor"),
        ("cut", "what rank 1 hands in is a tensor that is already cut"),
        ("thin", "cannot cut dim 2 (extent 1)"),
        ("no such rank", "src=2: the ranks of the grid are numbered 0 to 1"),
        ("two sources", "rank 1: src=1"),
        ("channels", "rank 1: src=1, channels=False"),
    ],
)
def test_what_is_refused_on_every_rank(case: str, words: str) -> None:
    first, second = run_ranks(2, refused, case)
    assert first == second
    assert words in first


def without_the_source() -> None:
    grid = hs.Grid(depth=3)
    grid.barrier()
    if grid.rank == 1:
        os._exit(7)
    hs.scatter(None, grid, src=1)


def test_a_source_that_died_is_named() -> None:
    with pytest.raises(RankError, match="lost contact with rank 1"):
        run_ranks(3, without_the_source)
