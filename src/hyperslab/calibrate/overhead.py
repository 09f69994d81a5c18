"""What Python costs beside the operators: rules, autograd, hooks, the optimizer's loop."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.calibrate.clock import Clock
from hyperslab.calibrate.operators import distinct_operators, measure_operators
from hyperslab.comm import Grid
from hyperslab.machine import Overhead
from hyperslab.machine.links import Residual
from hyperslab.parallel import parallelize
from hyperslab.trace.step import Device, Workload, trace_step

DEPTHS = (1, 2, 4, 8)  # blocks of the networks that are compared
FEATURE_MAPS = 4
WIDTH = 8  # voxels: so few that Python's share is most of the step
OUTPUTS = 4


@dataclass(frozen=True, slots=True)
class _Point:
    """A step: its operators, and what of its time [s] is not theirs."""

    operators: int
    beside: float


def measure_overhead(clock: Clock) -> Overhead:
    """For each operator and for each step, from steps of small networks of several depths.

    All ranks call this, each with a sample of its own.
    """
    clock = clock.least  # a small difference of large numbers
    points = [_measure(blocks, clock) for blocks in DEPTHS]
    counts = np.array([point.operators for point in points], float)
    beside = np.array([point.beside for point in points])
    each, once = np.polyfit(counts, beside, 1)
    each = max(float(each), 0.0)
    once = max(float(once), 0.0)
    left = np.abs(once + each * counts - beside) / np.abs(beside)
    residual = Residual(median=float(np.median(left)), worst=float(left.max()))
    return Overhead(operator=each, step=once, residual=residual)


def _measure(blocks: int, clock: Clock) -> _Point:
    grid = Grid(data=clock.grid.size)
    shape = (grid.size, FEATURE_MAPS, WIDTH, WIDTH, WIDTH)
    workload = Workload(
        build=lambda: _network(blocks),
        inputs=shape,
        target=(grid.size, OUTPUTS),
        loss=F.mse_loss,
        optimizer=torch.optim.Adam,
    )
    device: Device = "cuda" if grid.device.type == "cuda" else "cpu"
    operators = trace_step(workload, grid.extents, grid.rank, device).operators
    entries, _ = measure_operators(distinct_operators(operators), clock, lambda: None)
    times = {entry.parsed: entry.seconds for entry in entries}
    compute = sum(times.get(operator.call, 0.0) for operator in operators)
    return _Point(len(operators), _step_seconds(blocks, grid, clock) - compute)


def _step_seconds(blocks: int, grid: Grid, clock: Clock) -> float:
    """A step, without the time of the gradients' sum."""
    model = parallelize(_network(blocks), grid)
    optimizer = torch.optim.Adam(model.parameters())
    x = hs.shard(torch.rand(grid.size, FEATURE_MAPS, WIDTH, WIDTH, WIDTH, device=grid.device), grid)
    y = hs.shard(torch.rand(grid.size, OUTPUTS, device=grid.device), grid)

    def step() -> None:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return clock.seconds(step) - _sum_seconds(model, grid, clock)


def _sum_seconds(model: nn.Module, grid: Grid, clock: Clock) -> float:
    if grid.size == 1:
        return 0.0
    gradients = torch.zeros(sum(p.numel() for p in model.parameters()), device=grid.device)
    return clock.seconds(lambda: grid.gradients.sum_in_place(gradients, "a measurement"))


def _network(blocks: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Conv3d(FEATURE_MAPS, FEATURE_MAPS, 3, padding=1), nn.LeakyReLU()]
    features = math.prod([FEATURE_MAPS, *[WIDTH // 2] * 3])
    return nn.Sequential(*layers, nn.AvgPool3d(2), nn.Flatten(), nn.Linear(features, OUTPUTS))
