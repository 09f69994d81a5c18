"""Networks of a public library train as they do serially (tier: a few gloo ranks)."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

from tests.networks.train import STEPS, Step, apart, train
from tests.networks.zoo import NETWORKS
from tests.ranks import run_ranks
from tests.selection import in_gate

GRIDS = {  # and how many steps: what one leaves for the next is looked at on one of them
    "2": ({"depth": 2}, 2),
    "2x2": ({"depth": 2, "height": 2}, 1),
    "2x2x2": ({"depth": 2, "height": 2, "width": 2}, 1),
}
IN_FLOAT32 = ["UNet", "SegResNet", "AttentionUnet", "DenseNet", "EfficientNet"]


@functools.cache
def serial(name: str, dtype: torch.dtype, steps: int) -> list[Step]:
    (found,) = run_ranks(1, train, name, None, dtype, steps)
    return found


def check(
    name: str,
    axes: dict[str, int],
    dtype: torch.dtype,
    tolerance: float,
    steps: int = STEPS,
    memory: str = "none",
) -> None:
    expected = serial(name, dtype, steps)
    assert len({step.loss for step in expected}) == steps
    for loss, gradient, cut in run_ranks(
        math.prod(axes.values()), apart, name, axes, dtype, expected, memory
    ):
        assert loss <= tolerance
        assert gradient <= tolerance
        assert cut or NETWORKS[name].goal == "numbers"


ALL = [(name, grid) for name in NETWORKS for grid in GRIDS]
IN_TURN = list(zip(NETWORKS, itertools.cycle(["2", "2x2", "2", "2x2", "2", "2x2x2"]), strict=False))


@pytest.mark.parametrize(("name", "grid"), in_gate(ALL, kept=IN_TURN))
def test_steps_of_training(name: str, grid: str) -> None:
    axes, steps = GRIDS[grid]
    check(name, axes, torch.float64, 1e-9, steps)


@pytest.mark.parametrize("name", in_gate(IN_FLOAT32, kept=["UNet"]))
def test_three_steps_in_float32(name: str) -> None:
    check(name, {"data": 2, "depth": 2}, torch.float32, 1e-4)


MEMORY = ("tile", "recompute", "offload")
OVER_SLABS = [(name, memory) for name in NETWORKS for memory in MEMORY]
IN_GATE = zip(["UNet", "BasicUNet", "AttentionUnet", "SegResNet"], (*MEMORY, "tile"), strict=True)


@pytest.mark.parametrize(("name", "memory"), in_gate(OVER_SLABS, kept=list(IN_GATE)))
def test_a_step_over_slabs(name: str, memory: str) -> None:
    """In the type whose normalisations slabs have kernels for."""
    check(name, {"depth": 2}, torch.float32, 2e-4, 1, memory)
