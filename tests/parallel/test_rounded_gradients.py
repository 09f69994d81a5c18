"""Gradients are rounded on their way (tier: a few gloo ranks without shared memory)."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hyperslab as hs
from hyperslab.comm import shared_channels, shared_memory
from hyperslab.comm.shared_memory import MOST_OF_FREE_MEMORY
from hyperslab.parallel import averaging
from hyperslab.parallel.averaging import average_rounded
from hyperslab.parallel.parallelize import _check_rounding
from tests.ranks import RankError, fresh_groups, run_ranks

HALF_A_STEP = 2.0**-8  # of a bfloat16's 8 bits, as a share of the number


@pytest.fixture(autouse=True)
def own_groups() -> Iterator[None]:
    fresh_groups()  # one that shares memory already would go on doing so
    yield
    fresh_groups()


@contextmanager
def apart() -> Iterator[None]:
    """Grids are of ranks that share no memory, as on several machines."""
    shared_memory.MOST_OF_FREE_MEMORY = 0.0
    try:
        yield
    finally:
        shared_memory.MOST_OF_FREE_MEMORY = MOST_OF_FREE_MEMORY


def numbers(rank: int, count: int) -> torch.Tensor:
    """Of many sizes, with zeros of both signs, subnormals and ties among them."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    some = torch.randn(count, generator=generator) * torch.exp(
        8 * torch.randn(count, generator=generator)
    )
    some[1::7] = 1e-40
    some[2::11] = 1 + 2.0**-8  # half way between two neighbours
    some[::7] = -0.0
    return some


SIZES = (1, 2, 5, 64, 1003)


def averaged() -> list[torch.Tensor]:
    group = dist.group.WORLD
    assert group is not None
    found = []
    for count in SIZES:
        mine = numbers(dist.get_rank(), count)
        average_rounded(mine, group)
        found.append(mine)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_mean_of_rounded_numbers_rounded_once_more(ranks: int) -> None:
    first, *others = run_ranks(ranks, averaged)
    for count, found, *elsewhere in zip(SIZES, first, *others, strict=True):
        for other in elsewhere:
            assert torch.equal(found.view(torch.int32), other.view(torch.int32))
        expected = torch.stack([numbers(r, count).bfloat16().double() for r in range(ranks)])
        mean = expected.mean(0)
        assert torch.equal(found.bfloat16().float(), found)
        # A sum in float32 may be on the other side of where two neighbours meet.
        largest = expected.abs().sum(0)
        off = (found.double() - mean).abs()
        assert (off <= HALF_A_STEP * mean.abs() + 1e-6 * largest + 1e-40).all()
        assert found[::7].signbit().all()


class Network(nn.Module):
    """Convolutions that are cut, dense layers that are not, a type of its own, one not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(2, 5, 3, padding=1)
        self.second = nn.Conv3d(5, 3, 3, padding=1, bias=False)
        self.dense = nn.Linear(3, 7)
        self.scale = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.unused = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x))).mean((2, 3, 4))
        return self.dense(y).double() * self.scale


def by_name(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def trained(axes: dict[str, int]) -> list[dict[str, torch.Tensor | None]]:
    """This rank's own gradients, then the averages: exact, rounded, rounded over two passes."""
    found = []
    with apart():
        grid = hs.Grid(**axes)
        assert shared_channels() is None
        for sent, passes in (("exact", 0), ("exact", 1), ("bf16", 1), ("bf16", 2)):
            torch.manual_seed(1)
            model = hs.parallelize(Network(), grid, gradients=sent)  # type: ignore[arg-type]
            x = hs.shard(torch.randn(2, 2, 9, 7, 6), grid)
            for last in range(passes - 1, -1, -1) or [1]:
                if last:
                    with model.no_sync():  # type: ignore[operator]
                        model(x).square().mean().backward()
                else:
                    model(x).square().mean().backward()
            found.append(by_name(model))
    return found


GRIDS: list[dict[str, int]] = [{"depth": 2}, {"data": 2}, {"data": 2, "width": 2}, {"height": 4}]


@pytest.mark.parametrize("axes", GRIDS, ids=str)
def test_gradients_are_the_rounded_mean_of_rounded_ones(axes: dict[str, int]) -> None:
    ranks = [*itertools.accumulate(axes.values(), int.__mul__)][-1]
    results = run_ranks(ranks, trained, axes)
    _, exact, rounded, twice = results[0]
    for name, found in rounded.items():
        assert all(same(result[2][name], found) for result in results)
        if name == "unused":
            assert found is None
            assert twice[name] is None
            continue
        before, both = exact[name], twice[name]
        assert found is not None
        assert before is not None
        assert both is not None
        if name == "scale":  # float64
            assert torch.allclose(found, before, rtol=1e-6, atol=0)
            continue
        own = [result[0][name] for result in results]
        parts = torch.stack([p.bfloat16().double() for p in own if p is not None])
        mean, largest = parts.mean(0), parts.abs().sum(0)
        assert len(parts) == ranks
        assert ((found.double() - mean).abs() <= HALF_A_STEP * mean.abs() + 1e-6 * largest).all()
        assert not torch.equal(found, before)
        # Two equal passes have twice the gradient, and a power of two changes no rounding.
        assert torch.allclose(both, 2 * found, rtol=2.0**-7, atol=0)


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def said(gradients: str, share: bool) -> tuple[list[str], bool]:
    """What the log says, and whether gradients are those without the option."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(  # type: ignore[method-assign]
        f"{record.levelname}: {record.getMessage()}"
    )
    log = logging.getLogger("hyperslab")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    found = []
    shared_memory.MOST_OF_FREE_MEMORY = MOST_OF_FREE_MEMORY if share else 0.0
    try:
        grid = hs.Grid(depth=2)
        for sent in ("exact", gradients):
            torch.manual_seed(2)
            layer = hs.parallelize(nn.Conv3d(1, 3, 3), grid, gradients=sent)  # type: ignore[arg-type]
            layer(hs.shard(torch.randn(1, 1, 6, 5, 5), grid)).square().mean().backward()
            found.append(layer.weight.grad)
    finally:
        shared_memory.MOST_OF_FREE_MEMORY = MOST_OF_FREE_MEMORY
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return [line for line in lines if "gradients" in line], same(*found)


def test_the_log_says_that_it_is_inexact() -> None:
    assert run_ranks(2, said, "exact", False)[0] == ([], True)
    (line,), equal = run_ranks(2, said, "bf16", False)[0]
    assert line.startswith("WARNING")
    assert "INEXACT" in line
    assert "bfloat16" in line
    assert not equal


def test_ranks_that_share_memory_send_nothing_and_are_exact() -> None:
    (line,), equal = run_ranks(2, said, "bf16", True)[0]
    assert line.startswith("INFO")
    assert line.endswith("they are exact")
    assert equal


def threads_left() -> list[int]:
    """How many threads there are more with a module, and when it has gone."""
    with apart():
        grid = hs.Grid(depth=2)
        before = {*threading.enumerate()}
        model = hs.parallelize(nn.Conv3d(1, 3, 3), grid, gradients="bf16")
        model(hs.shard(torch.randn(1, 1, 6, 5, 5), grid)).sum().backward()
        during = {*threading.enumerate()} - before
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None
        for thread in during:
            thread.join(20)
        return [len(during), sum(thread.is_alive() for thread in during)]


def test_the_thread_ends_with_the_module() -> None:
    assert run_ranks(2, threads_left) == [[1, 0]] * 2


def one_dies() -> None:
    with apart():
        grid = hs.Grid(depth=2)
        model = hs.parallelize(nn.Conv3d(1, 3, 3), grid, gradients="bf16")
        y = model(hs.shard(torch.randn(1, 1, 6, 5, 5), grid)).square().mean()
        if grid.rank == 1:
            os._exit(3)
        y.backward()


def test_a_lost_rank_is_named_in_the_backward_pass() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, one_dies)
    caught.match("CommError: rank 0 lost contact with rank 1 during")


def test_gpus_are_refused() -> None:
    """A grid that says so stands in for one of GPUs."""
    with pytest.raises(hs.LayoutError, match="these compute on cuda devices\n    use gradients"):
        _check_rounding("bf16", GridOfGpus())


class GridOfGpus(hs.Grid):
    def __init__(self) -> None:
        self.size = 2
        self.device = torch.device("cuda")


def unknown() -> None:
    hs.parallelize(nn.Conv3d(1, 1, 3), hs.Grid(depth=2), gradients="fp8")  # type: ignore[arg-type]


def test_an_unknown_word() -> None:
    with pytest.raises(hs.LayoutError, match="gradients='fp8'; use one of exact, bf16"):
        run_ranks(2, unknown)


def begun_before_the_end(sent: str) -> bool:
    """Whether a bucket is on its way while the first layer's gradient has yet to come."""
    begun = threading.Event()

    def first(gradient: torch.Tensor) -> None:
        if sent == "exact":
            assert group._get_sequence_number_for_group() > before
        else:
            assert begun.wait(30)

    def noted(gradients: torch.Tensor, group: dist.ProcessGroup) -> None:
        begun.set()
        average_rounded(gradients, group)

    with apart(), mock.patch.object(averaging, "average_rounded", noted):
        grid = hs.Grid(data=2)
        layers = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))  # each fills a bucket
        model = hs.parallelize(layers, grid, gradients=sent)  # type: ignore[arg-type]
        group = grid.gradients.group
        x = hs.shard(torch.randn(2, 600), grid)
        model(x).sum().backward()  # in one bucket, by whose order others are made
        y = model(x)
        layers[0].bias.register_hook(first)
        before = group._get_sequence_number_for_group()
        begun.clear()
        y.sum().backward()
    return True


@pytest.mark.parametrize("sent", ["exact", "bf16"])
def test_buckets_leave_while_the_backward_pass_goes_on(sent: str) -> None:
    assert run_ranks(2, begun_before_the_end, sent) == [True] * 2
