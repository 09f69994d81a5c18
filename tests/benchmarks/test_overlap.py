"""The hidden share: what it is of known times, and what is left out (tier: two gloo ranks)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from overlap import VARIANTS, Delivered, MeasuredGrid, Variants, hidden, measure

import hyperslab as hs
from hyperslab.comm import shared_memory
from tests.ranks import fresh_groups, run_ranks


def times(actual: float, blocking: float, without: float, noise: float = 0.0) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    known = {"actual": actual, "halos blocking": blocking, "halos without": without}
    return {name: t + noise * draw.standard_normal(12) for name, t in known.items()}


@pytest.mark.parametrize(
    ("actual", "share"), [(1.0, 1.0), (1.2, 0.0), (1.05, 0.75), (1.3, -0.5)], ids=str
)
def test_the_share_of_known_times(actual: float, share: float) -> None:
    found = hidden(times(actual, 1.2, 1.0, noise=0.002), "halos")
    assert found["seconds"]["value"] == pytest.approx(0.2, abs=0.01)
    assert found["share"]["value"] == pytest.approx(share, abs=0.05)
    assert found["share"]["low"] <= found["share"]["value"] <= found["share"]["high"]


@pytest.mark.parametrize("without", [1.2, 1.199, 1.3])
def test_what_is_within_the_noise_is_no_share(without: float) -> None:
    assert hidden(times(1.1, 1.2, without, noise=0.1), "halos")["share"] is None


def ways() -> list[bool]:
    """Whether halos are right, have ended at once, and are nobody's, by the way they are sent."""
    grid = MeasuredGrid(depth=2)
    found = []
    for way in ("actual", "blocking", "without"):
        x = torch.randn(1, 2, 6, 4, 4)  # another each time: what arrived before may still be there
        cut = hs.shard(x, grid)
        grid.halos.way = way
        found.append(torch.equal(cut.full(), x))
        buffer = torch.ones(3)
        other = 1 - grid.rank
        pending = grid.halos.exchange([(other, torch.full((3,), 7.0))], [(other, buffer)], "a test")
        found.append(isinstance(pending, Delivered))
        found.append(float(pending.wait()[0].sum()) == 21)
    return found


def test_the_ways_of_a_halo() -> None:
    right = [True, False, True, True, True, True, False, True, False]
    assert run_ranks(2, ways) == [right, right]


def measured(memory: bool) -> list[bool]:
    """Whether a variant's gradients are right, and its loss."""
    if not memory:
        shared_memory.MOST_OF_FREE_MEMORY = 0.0
    try:
        variants = Variants("unet3d", 16, {"depth": 2}, torch.float32)
    finally:
        shared_memory.MOST_OF_FREE_MEMORY = 0.5
    found = []
    for name in VARIANTS:
        assert variants.seconds(name) > 0
        weights = list(variants.step.case.model.parameters())
        gradients = [w.grad.clone() for w in weights if w.grad is not None]
        if name == "actual":
            right = gradients
            loss = variants.step.loss.item()
        found += [variants.step.loss.item() == loss]
        found += [all(map(torch.allclose, gradients, right))]
    turns = measure(variants, 2)["turns"]
    assert {name: len(times) for name, times in turns.items()} == dict.fromkeys(VARIANTS, 2)
    return found


@pytest.mark.long
@pytest.mark.parametrize("memory", [True, False], ids=["shared memory", "gloo"])
def test_what_is_left_out_of_a_step(memory: bool) -> None:
    fresh_groups()  # others share memory, or do not
    actual = [True, True]
    halos = [True, True, False, False]
    gradients = [True, True, True, False]
    assert run_ranks(2, measured, memory) == [[*actual, *halos, *gradients]] * 2
    fresh_groups()
