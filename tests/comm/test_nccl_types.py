"""A backend that refuses the types that NCCL refuses (tier: a few gloo ranks)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hyperslab as hs
from hyperslab.comm import communicator
from hyperslab.comm.collectives import stack_ranks
from hyperslab.errors import UnsupportedOp
from hyperslab.parallel import averaging
from tests.ranks import run_ranks

OF_NCCL = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
}
COUNTS = [torch.int16, torch.uint16, torch.uint32, torch.bool, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]


@contextmanager
def as_nccl() -> Iterator[None]:
    """Between ranks that share no memory, over gloo that takes NCCL's types only.

    It adds bools up as NCCL does, to a bool.
    """

    def check(x: torch.Tensor, *, sums: bool = False) -> None:
        if x.dtype not in OF_NCCL and not (sums and x.is_complex()):
            raise TypeError(f"Input tensor data type is not supported for NCCL: {x.dtype}")

    reduce, broadcast = dist.all_reduce, dist.broadcast
    begin, add = communicator.begin_messages, communicator.sum_in_group

    def sum_in_group(group: Any, x: torch.Tensor) -> None:
        check(x, sums=True)
        assert x.dtype != torch.bool
        add(group, x)

    def all_reduce(x: torch.Tensor, op: Any = dist.ReduceOp.SUM, **more: Any) -> Any:
        check(x, sums=op == dist.ReduceOp.SUM)
        assert x.dtype != torch.bool
        return reduce(x, op=op, **more)

    def checked_broadcast(x: torch.Tensor, **more: Any) -> Any:
        check(x)
        return broadcast(x, **more)

    def messages(group: Any, receives: Any, sends: Any) -> Any:
        for _, x in (*receives, *sends):
            check(x)
        return begin(group, receives, sends)

    with ExitStack() as stack:
        parallel = sys.modules["hyperslab.parallel.parallelize"]  # a function has its name
        for module in (communicator, averaging, parallel):
            stack.enter_context(mock.patch.object(module, "shared_channels", return_value=None))
        stack.enter_context(mock.patch.object(dist, "all_reduce", all_reduce))
        stack.enter_context(mock.patch.object(dist, "broadcast", checked_broadcast))
        stack.enter_context(mock.patch.object(communicator, "begin_messages", messages))
        stack.enter_context(mock.patch.object(communicator, "sum_in_group", sum_in_group))
        yield


def values(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Numbers that ranks can add up, as far as the type goes."""
    numbers = torch.tensor([0, 1, 40 + rank, 100])
    if dtype.is_complex:
        return torch.complex(numbers.double(), -numbers.double() - rank).to(dtype)
    return numbers.to(dtype)


def sums() -> None:
    grid = hs.Grid(depth=3)
    group = grid.group(("depth",))
    assert group is not None
    with as_nccl():
        for dtype in (*COUNTS, *COMPLEX):
            x = values(dtype, grid.rank)
            expected = torch.stack(
                [values(dtype, rank).to(torch.complex128) for rank in range(3)]
            ).sum(0)
            if dtype == torch.uint8:
                expected = expected.real % 256  # type: ignore[assignment] - as torch's
            elif dtype == torch.bool:
                expected = expected.real > 0  # type: ignore[assignment]
            elif not dtype.is_complex:
                expected = expected.real  # type: ignore[assignment]
            assert group.sum_in_place(x, "a test") is x
            assert torch.equal(x, expected.to(dtype)), dtype
            stack = stack_ranks(values(dtype, grid.rank), group, "a test")
            assert stack.dtype == dtype
            for rank, row in enumerate(stack):
                assert torch.equal(row, values(dtype, rank)), dtype
        with pytest.raises(UnsupportedOp, match=r"a test: ranks cannot add up torch\.uint64.*\(2,"):
            group.sum_in_place(torch.zeros(2, dtype=torch.uint64), "a test")


def test_sums_of_types_that_nccl_lacks() -> None:
    run_ranks(3, sums)


class Counts(nn.Module):
    """A network of raw counts, with buffers and parameters of odd types."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        for dtype in (*COUNTS, *COMPLEX):
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(name, values(dtype, seed))
        self.spectrum = nn.Parameter(values(torch.complex64, seed))
        self.layer = nn.Conv3d(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.float()).mean((2, 3, 4)) * self.spectrum.real.sum()


def network_of_counts() -> None:
    grid = hs.Grid(depth=2, height=2)
    torch.manual_seed(grid.rank)
    full = (torch.arange(2 * 9 * 7 * 4) % 199).view(2, 1, 9, 7, 4).to(torch.int16)
    with as_nccl():
        model = hs.parallelize(Counts(grid.rank), grid)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, values(buffer.dtype, 0)), name
        x = hs.shard(full, grid)
        y = model(x)
        y.full().sum().backward()
        assert torch.equal(x.full(), full)
        assert torch.equal(x.amax((2, 3, 4)).full(), full.amax((2, 3, 4)))
        assert torch.equal(x.sum((2, 3, 4)).full(), full.sum((2, 3, 4)))
        assert bool((x > 190).any()) is True
        assert bool((x > 198).any()) is False
        assert torch.equal(x.cumsum(2).full(), full.cumsum(2))
        assert torch.equal(hs.gather(x, ("depth",)).full(), full)
        scattered = hs.scatter(full if grid.is_main else None, grid)
        assert torch.equal(scattered.full(), full)
        spectrum = torch.fft.fftn(x.double(), dim=(2, 3, 4))
        assert torch.allclose(spectrum.full(), torch.fft.fftn(full.double(), dim=(2, 3, 4)))
        with torch.no_grad():
            model.layer.weight += grid.rank == 1
            model.spectrum += 0
        with pytest.raises(hs.LayoutError, match=r"has another 'layer\.weight'"):
            model(hs.shard(full, grid))  # the second forward, which looks at parameters


def test_a_network_of_raw_counts() -> None:
    run_ranks(4, network_of_counts)
