"""Parameters or losses that are not equal on all ranks are noticed (tier: a few gloo ranks)."""

from __future__ import annotations

import logging
import random
from logging.handlers import BufferingHandler

import pytest
import torch
from torch import nn

import hyperslab as hs
from hyperslab.comm.collectives import AllGatheredInts
from tests.ranks import run_ranks


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv3d(2, 1, 3, padding=1))


def steps(case: str, count: int) -> int:
    """How many forward passes went well."""
    grid = hs.Grid(depth=2)
    model = hs.parallelize(network(), grid)
    last = grid.rank == 1
    rate = 0.02 if case == "rate" and last else 0.01
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    x = hs.shard(torch.linspace(-1, 1, 64).view(1, 1, 4, 4, 4), grid)
    if case == "loaded" and last:
        model.load_state_dict(network().state_dict())
    if case == "rounding" and last:
        with torch.no_grad():
            model[2].weight *= 1 + torch.finfo(torch.float32).eps
    for step in range(count):
        if case == "later" and last and step == 3:
            model[0].bias.data += 1
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return count


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("loaded", "rank 1 has another '0.weight' than rank 0, at forward 1 of its training"),
        ("rate", "rank 1 has another '0.weight' than rank 0, at forward 2 of its training"),
        ("later", "rank 1 has another '0.bias' than rank 0, at forward 4 of its training"),
    ],
)
def test_a_difference_is_named(case: str, words: str) -> None:
    with pytest.raises(hs.LayoutError) as caught:
        run_ranks(2, steps, case, 4)
    assert words in str(caught.value)
    assert "the same optimiser, learning rate and clipping on every rank" in str(caught.value)


@pytest.mark.parametrize("case", ["equal", "rounding"])
def test_training_goes_on(case: str) -> None:
    assert run_ranks(2, steps, case, 9) == [9, 9]


def messages() -> list[int]:
    """In each of ten steps."""
    grid = hs.Grid(depth=2)
    model = hs.parallelize(network(), grid)
    x = hs.shard(torch.zeros(1, 1, 4, 4, 4), grid)
    made: list[object] = []
    counts = []
    before = AllGatheredInts.__init__
    try:
        AllGatheredInts.__init__ = lambda self, *a: made.append(before(self, *a))  # type: ignore[method-assign,assignment]
        for _ in range(10):
            model(x).sum().backward()
            counts.append(len(made))
            made.clear()
            with torch.no_grad():
                model(x)  # not a step
    finally:
        AllGatheredInts.__init__ = before  # type: ignore[method-assign]
    return counts


def test_the_looks_are_ever_rarer() -> None:
    assert run_ranks(2, messages) == [[2, 2, 0, 2, 0, 0, 0, 2, 0, 0]] * 2


def losses(case: str) -> list[str]:
    """What is logged of two passes through two networks."""
    grid = hs.Grid(depth=2) if case == "of the block" else hs.Grid(data=2)
    model, other = (hs.parallelize(network(), grid) for _ in range(2))
    x = hs.shard(torch.linspace(-1, 1, 288).view(2, 1, 9, 4, 4), grid)
    handler = BufferingHandler(1000)
    logger = logging.getLogger("hyperslab")
    logger.addHandler(handler)
    try:
        for _ in range(2):
            y = model(other(x)).square()
            share = random.random() if case == "of Python" else torch.rand(())
            count = y.local.numel() if case == "of the block" else y.numel()
            loss = y.sum() * share / count
            broken = case == "nan" or (case == "nan of one" and grid.rank == 1)
            (loss * float("nan") if broken else loss).backward()
    finally:
        logger.removeHandler(handler)
    lines = [record.getMessage() for record in handler.buffer]
    return [line for line in lines if "the ranks' losses differ" in line]


@pytest.mark.parametrize("case", ["of Python", "of the block", "nan of one"])
def test_losses_that_differ_are_named(case: str) -> None:
    (line,), others = run_ranks(2, losses, case)
    assert others == []
    assert "gradients are those of their mean" in line
    assert "on rank 0" in line
    assert "on rank 1" in line


@pytest.mark.parametrize("case", ["of torch", "nan"])
def test_equal_losses_are_not(case: str) -> None:
    assert run_ranks(2, losses, case) == [[], []]
