"""A first look at all grids, from one traced sample and geometry alone.

It is an estimate and no bound: it takes operators to be as fast for a block as for the whole, and
halos to be as thick as the kernel says. It only chooses which grids are traced.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hyperslab.comm.grid import AXES, SPATIAL_AXES
from hyperslab.machine import Machine
from hyperslab.plan.grids import samples_each
from hyperslab.plan.job import GridJob, VolumeShape
from hyperslab.recipe.schema import GridSection
from hyperslab.trace import LocalOperator, TensorSpec, Trace, trace_step
from hyperslab.trace.step import Device

CONVOLUTION = "aten.convolution.default"


@dataclass(frozen=True, slots=True)
class HaloWindow:
    """A convolution of one sample: its input's map, halo planes on each side, bytes of a voxel."""

    extents: VolumeShape
    planes: VolumeShape
    voxel: int
    seconds: float  # of its forward pass, for the whole map


@dataclass(frozen=True)
class Rough:
    """What one sample takes on one rank, so that any grid's step can be guessed.

    ``maps``: [s] of all operators by the extents of the map on which they work; ``fixed``: [s] of
    those that see no map, and of the optimizer; ``kept`` [B] of activations for a sample and
    ``held`` [B] of the rest.
    """

    job: GridJob
    machine: Machine
    maps: dict[VolumeShape, float]
    windows: tuple[HaloWindow, ...]
    fixed: float
    gradients: int
    kept: int
    held: int

    def seconds(self, grid: GridSection) -> float:
        """About how long a step takes [s]: FP and BD + BF of Oyama et al. 2020, section III-C."""
        samples = samples_each(grid, self.job)
        work = samples * sum(s * _share(extents, grid) for extents, s in self.maps.items())
        reduced = self.machine.all_reduce_seconds(self.gradients, grid.size)
        exposed = sum(self._exposed(window, grid, samples) for window in self.windows)
        hidden = self.machine.hidden.gradients * min(reduced, work)
        return self.job.accumulated * (work + exposed) + reduced - hidden + self.fixed

    @property
    def alone(self) -> float:
        """Of a step on one rank that is as fast as one of many, without communication [s]."""
        work = self.job.batch * sum(self.maps.values())
        return self.job.accumulated * work + self.fixed

    def memory(self, grid: GridSection) -> int:
        """About how much a rank needs [B]."""
        share = _share(self.job.about.shape[1:], grid)
        return self.held + int(samples_each(grid, self.job) * share * self.kept)

    def _exposed(self, window: HaloWindow, grid: GridSection, samples: int) -> float:
        """Of the halos of a convolution, forward and backward [s]."""
        sent = 2 * sum(self._messages(window, grid, samples))
        work = 3 * samples * window.seconds * _share(window.extents, grid)
        return sent - self.machine.hidden.halos * min(sent, work)

    def _messages(self, window: HaloWindow, grid: GridSection, samples: int) -> Iterator[float]:
        """2 SR for each axis that cuts; 1 SR where there are two ranks along it [s]."""
        local = [
            extent / _parts(extent, getattr(grid, axis))
            for extent, axis in zip(window.extents, SPATIAL_AXES, strict=True)
        ]
        for dim, axis in enumerate(SPATIAL_AXES):
            parts = _parts(window.extents[dim], getattr(grid, axis))
            if parts > 1 and window.planes[dim]:
                face = math.prod(local) / local[dim] * window.planes[dim]
                peer = _stride(grid, axis)
                nbytes = int(samples * face * window.voxel)
                yield min(2, parts - 1) * self.machine.send_seconds(nbytes, 0, peer)


def rough(job: GridJob, machine: Machine, ranks: int) -> Rough:
    """Trace one sample on one rank."""
    work = job.workload()
    target = None if work.target is None else (1, *work.target[1:])
    trace = trace_step(
        replace(work, inputs=(1, *work.inputs[1:]), target=target),
        {},
        device=device_of_machine(machine),
    )
    setting = machine.setting(ranks)
    maps: dict[VolumeShape, float] = defaultdict(float)
    fixed = setting.overhead.step
    for operator in trace.operators:
        extents = _map_of(operator)
        seconds = setting.estimate(operator).seconds + setting.overhead.operator
        if extents is None or operator.stage == "optimizer":
            fixed += seconds
        else:
            maps[extents] += seconds
    held = trace.parameters + trace.gradients + trace.optimizer_state
    windows = tuple(_windows(trace, machine, ranks))
    kept = max(0, trace.peak - held)
    return Rough(
        job=job,
        machine=machine,
        maps=dict(maps),
        windows=windows,
        fixed=fixed,
        gradients=trace.gradients,
        kept=kept,
        held=held,
    )


def device_of_machine(machine: Machine) -> Device:
    """Of its devices, as a trace takes it."""
    return "cpu" if machine.device == "cpu" else "cuda"


def _windows(trace: Trace, machine: Machine, ranks: int) -> Iterator[HaloWindow]:
    setting = machine.setting(ranks)
    for operator in trace.operators:
        x, weight, *_ = (*operator.call.tensors(), None, None)
        if operator.call.name == CONVOLUTION and x is not None and weight is not None:
            planes = tuple((k - 1) // 2 for k in weight.shape[2:])
            voxel = x.shape[1] * x.dtype.itemsize
            seconds = setting.estimate(operator).seconds
            if len(x.shape) == 5:
                yield HaloWindow(x.shape[2:], planes, voxel, seconds)


def _map_of(operator: LocalOperator) -> VolumeShape | None:
    volumes = [spec for spec in operator.call.tensors() if len(spec.shape) == 5]
    if not volumes or operator.stage == "optimizer":
        return None
    return max(volumes, key=_voxels).shape[2:]


def _voxels(spec: TensorSpec) -> int:
    return math.prod(spec.shape[2:])


def _share(extents: VolumeShape, grid: GridSection) -> float:
    """Of a map, the largest part that a rank has; an axis that is too thin does not cut it."""
    return math.prod(
        -(-extent // _parts(extent, getattr(grid, axis))) / extent
        for extent, axis in zip(extents, SPATIAL_AXES, strict=True)
    )


def _parts(extent: int, ranks: int) -> int:
    return ranks if extent >= ranks else 1


def _stride(grid: GridSection, axis: str) -> int:
    """How far apart neighbours along an axis are numbered."""
    later = AXES[AXES.index(axis) + 1 :]
    return math.prod(getattr(grid, other) for other in later)
