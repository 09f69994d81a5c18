"""What Python costs beside the operators: rules, autograd, hooks, the optimizer's loop."""

from __future__ import annotations

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
from hyperslab.trace.records import Exchange
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

    All ranks call this. They cut the volume along its depth, so that rules and halos are in it;
    the time of the messages themselves is not.
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
    grid = Grid(depth=clock.grid.size)
    shape = (1, FEATURE_MAPS, WIDTH * grid.size, WIDTH, WIDTH)
    workload = Workload(
        build=lambda: _network(blocks, grid.size),
        inputs=shape,
        target=(1, OUTPUTS),
        loss=F.mse_loss,
        optimizer=torch.optim.Adam,
    )
    device: Device = "cuda" if grid.device.type == "cuda" else "cpu"
    traces = [trace_step(workload, grid.extents, rank, device) for rank in range(grid.size)]
    mine = traces[grid.rank]
    every = [operator for trace in traces for operator in trace.operators]
    entries, _ = measure_operators(distinct_operators(every), clock, lambda: None)
    times = {entry.parsed: entry.seconds for entry in entries}
    compute = sum(times.get(operator.call, 0.0) for operator in mine.operators)
    exchanges = [event for event in mine.events if isinstance(event, Exchange)]
    messages = sum(_exchange_seconds(event, grid, clock) for event in exchanges)
    step = _step_seconds(blocks, shape, grid, clock)
    return _Point(len(mine.operators), step - compute - messages)


def _exchange_seconds(event: Exchange, grid: Grid, clock: Clock) -> float:
    """The same messages alone; every rank has as many."""
    sends = [
        (peer, torch.zeros(n, dtype=torch.uint8, device=grid.device)) for peer, n in event.sends
    ]
    buffers = [
        (peer, torch.empty(n, dtype=torch.uint8, device=grid.device)) for peer, n in event.receives
    ]
    return clock.seconds(lambda: grid.halos.exchange(sends, buffers, "a measurement").wait())


def _step_seconds(blocks: int, shape: tuple[int, ...], grid: Grid, clock: Clock) -> float:
    """A step, without the time of the gradients' sum."""
    model = parallelize(_network(blocks, grid.size), grid)
    optimizer = torch.optim.Adam(model.parameters())
    x = hs.shard(torch.rand(shape, device=grid.device), grid)
    y = hs.shard(torch.rand(1, OUTPUTS, device=grid.device), grid)

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


def _network(blocks: int, ranks: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Conv3d(FEATURE_MAPS, FEATURE_MAPS, 3, padding=1), nn.LeakyReLU()]
    features = FEATURE_MAPS * ranks * (WIDTH // 2) ** 3
    return nn.Sequential(*layers, nn.AvgPool3d(2), nn.Flatten(), nn.Linear(features, OUTPUTS))
