"""Searches for the best grid: estimates every one roughly, traces the promising ones, ranks them.

In reading order: all grids of a number of ranks, which of them a job cannot have, and the rank that
decides how long a step takes; how much memory a rank may have (`PlanBounds`); `roofline_estimate`,
a first look at all grids from one traced sample and geometry alone; `trace_one`, what the step of
one traced grid costs; `make_plan`, the ranking; `least_ranks` and `suggested_changes`, what else
would help.

The roofline estimate is no bound: it takes operators to be as fast for a block as for the whole.
It only chooses which grids are traced.
"""

from __future__ import annotations

import functools
import math
import resource
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray

from hyperslab.comm import AXES
from hyperslab.comm.placement import SPATIAL_AXES, places
from hyperslab.data.dataset import PrefetchPolicy
from hyperslab.data.store import MEMORY_SHARE
from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.formats.storage import divisors
from hyperslab.parallel.parallelize import Memory
from hyperslab.planner import cost as costs
from hyperslab.planner.job import GridJob, VolumeShape
from hyperslab.planner.machine import Machine, Setting
from hyperslab.planner.records import Exchange, LocalOperator, Trace, Wait
from hyperslab.planner.trace import Device, VirtualGrid, Workload, trace_step
from hyperslab.planner.unbacked_memory import TooLargeError
from hyperslab.recipe.schema import GridSection, planned_device
from hyperslab.util.free_memory import free_memory
from hyperslab.util.gpu_memory import free_gpu_memory
from hyperslab.util.torch_internals import import_compiler

MOST_PLANNED = 1 << 30
"""Limits the ranks whose grids are listed."""


def grids(ranks: int) -> Iterator[GridSection]:
    """Lists every grid of so many ranks, by data, depth, height and width, the largest first.

    >>> [tuple(grid.model_dump().values()) for grid in grids(2)]
    [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)]

    Raises:
        LayoutError: they are more than `MOST_PLANNED`.
    """
    if ranks > MOST_PLANNED:
        raise LayoutError(
            f"{ranks} ranks are more than any machine has; plan {MOST_PLANNED} at most"
        )
    for data in _divisors(ranks):
        for depth in _divisors(ranks // data):
            for height in _divisors(ranks // (data * depth)):
                width = ranks // (data * depth * height)
                yield GridSection(data=data, depth=depth, height=height, width=width)


@functools.cache
def _divisors(number: int) -> list[int]:
    """Lists them, the largest first."""
    return sorted(divisors(number), reverse=True)


def refusal(grid: GridSection, job: GridJob) -> str:
    """Returns the error that training on the grid would raise, in words; "" if it can be.

    A grid with more replicas than a mini-batch has samples would run, and repeat all work.
    """
    if grid.data > job.batch:
        return (
            f"a mini-batch of {job.batch} is not cut over {grid.data} replicas: they would repeat "
            "each other's work"
        )
    try:
        VirtualGrid(grid.model_dump()).partition(job.inputs)
    except LayoutError as error:
        return str(error)
    return ""


def words_of(grid: GridSection) -> str:
    """Writes a grid as in a recipe's overrides.

    >>> words_of(GridSection(data=2, height=4))
    'data=2 height=4'
    """
    cut = {axis: extent for axis, extent in grid.model_dump().items() if extent > 1}
    return " ".join(f"{axis}={extent}" for axis, extent in cut.items()) or "data=1"


_NODE_FARNESS = 10  # a neighbour on another node counts as so many on another socket


def slowest_rank(extents: Mapping[str, int], inputs: VolumeShape, machine: Machine) -> int:
    """Finds the worst placed of the ranks with most neighbours and the largest blocks.

    ``inputs`` is (N, C, D, H, W). All others wait for that rank, for neighbours exchange halos.

    A line of eight ranks, four on a node: ranks 3 and 4 talk over the network.

    >>> from hyperslab.planner.machine import load_machine
    >>> slowest_rank({"depth": 8}, (1, 4, 64, 64, 64), load_machine("lassen-v100"))
    3
    """
    shape = tuple(extents.get(axis, 1) for axis in AXES)
    ranks = np.arange(np.prod(shape)).reshape(shape)
    place = places(extents, machine.ranks_per_node, inputs[2:]).reshape(shape)
    far = np.zeros(shape)
    alike = np.ones(shape, dtype=bool)
    cut = (inputs[0], *inputs[2:])
    for dim, (parts, extent) in enumerate(zip(shape, cut, strict=True)):
        # Views with the axis in front, through which the arrays are written.
        along = np.moveaxis(far, dim, 0)
        numbers = np.moveaxis(place, dim, 0)
        if dim > 0:
            sockets = np.diff(numbers // machine.ranks_per_socket, axis=0) != 0
            nodes = np.diff(numbers // machine.ranks_per_node, axis=0) != 0
            links = sockets + _NODE_FARNESS * nodes
            along[:-1] += links
            along[1:] += links
        np.moveaxis(alike, dim, 0)[~_as_the_first(parts, extent, inside=dim > 0)] = False
    return int(ranks[alike][np.argmax(far[alike])])


def places_of(grid: GridSection, job: GridJob, machine: Machine) -> NDArray[np.int64] | None:
    """Returns the places of a grid's ranks, as a run on the machine has them; None: in order."""
    place = places(grid.model_dump(), machine.ranks_per_node, job.about.shape[1:])
    return None if np.array_equal(place, np.arange(grid.size)) else place


def _as_the_first(parts: int, extent: int, *, inside: bool) -> NDArray[np.bool_]:
    """Marks the places with two neighbours (if any) and a shard as large as the first's."""
    at = np.arange(parts)
    larger = at < extent % parts
    if not inside or parts < 3:
        return larger == larger[0]
    return (at > 0) & (at < parts - 1) & (larger == larger[1])


PROCESS_STATUS = Path("/proc/self/status")

HOLES = 0.05  # of a GPU's memory, between blocks; nobody has measured it


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """Bounds a plan: a rank's memory [B] and where that is from, and the effort.

    ``process`` [B] is what an empty process takes of the memory; with ``everything`` every grid is
    traced.
    """

    nbytes: int
    reason: str
    process: int = 0
    everything: bool = False


def machine_bounds(machine: Machine, process: int = 0) -> PlanBounds:
    """Bounds plans by the memory that the machine's file says."""
    return PlanBounds(machine.memory, f"that of {machine.name}", process)


def host_bounds(ranks: int, device: str) -> PlanBounds:
    """Bounds plans by the memory that each of so many ranks on this host could have.

    Of a GPU what is free of its memory, without `HOLES`; else its part of what is free (of the
    machine, and of its control groups) together with what a process takes that is there already, or
    of the addresses that it may have (RLIMIT_AS), if that is less.
    """
    process = process_bytes(device)
    if device == "cuda" and torch.cuda.is_available():
        free = int((1 - HOLES) * _free_of_gpu())
        return PlanBounds(free, "the GPU's free memory", process)
    taken = process_bytes()
    free = free_memory() // ranks + taken
    reason = "a rank's share of this machine's free memory"
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        left = max(0, addresses - status_bytes("VmSize")) + taken
        if left < free:
            free = left
            reason = "the limit of a process's address space (ulimit -v)"
    return PlanBounds(free, reason, process)


def _free_of_gpu() -> int:
    """Returns what a rank could have of a GPU [B]; a process without a CUDA context makes none."""
    if torch.cuda.is_initialized():
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    free = free_gpu_memory()
    return torch.cuda.mem_get_info()[0] if free is None else free


def process_bytes(device: str = "cpu") -> int:
    """Measures the memory [B] of this process, with training's imports and no tensors.

    It is the host's, and so counts for nothing where ranks compute on GPUs.
    """
    if device != "cpu":
        return 0
    import_compiler()  # as a process's first optimizer does
    return status_bytes("VmRSS")


def status_bytes(key: str) -> int:
    """Returns an entry of this process's status, such as ``VmSize`` [B]."""
    lines = PROCESS_STATUS.read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[key].split()[0]) * 1024


@dataclass(frozen=True, slots=True)
class HaloExchange:
    """Describes one exchange of a traced step, so that its time follows for another grid.

    ``messages`` [B] are those to the neighbour along each axis, ``work`` [s] is what runs between
    the beginning of the exchange and the wait for it; both of one sample on the traced grid.
    """

    messages: dict[str, int]
    work: float


@dataclass(frozen=True)
class RooflineEstimate:
    """Scales what one sample takes on one rank, and its exchanges, to the step of any grid.

    ``maps``: [s] of all operators by the extents of the map on which they work; ``fixed``: [s] of
    those that see no map, and of the optimizer; ``kept`` [B] of activations for a sample and
    ``held`` [B] of the rest. ``exchanges`` were traced on the grid ``cut``.
    """

    job: GridJob
    machine: Machine
    maps: dict[VolumeShape, float]
    cut: GridSection
    exchanges: tuple[HaloExchange, ...]
    fixed: float
    gradients: int
    kept: int
    held: int

    def seconds(self, grid: GridSection) -> float:
        """Estimates the time of a step [s], with messages that hide behind work as in `step_cost`.

        Work shrinks as blocks do, a message as the face of a block through which it goes.
        """
        samples = self.job.samples_each(grid)
        work = samples * sum(s * _largest_share(extents, grid) for extents, s in self.maps.items())
        exposed = sum(self._exposed(exchange, grid, samples) for exchange in self.exchanges)
        reduced = self.machine.sum_seconds(self.gradients, range(grid.size))
        # Gradients of the last layers travel while those of the first are computed.
        late = costs.Lane(self.machine.hidden.gradients).exposed(work, reduced, reduced)
        step = self.job.accumulated * (work + exposed) + late + self.fixed
        return step + _exposed_input(self.job, grid, self.machine, step)

    @property
    def single_rank_seconds(self) -> float:
        """Estimates a step on one rank that is as fast as one of many [s]."""
        work = self.job.batch * sum(self.maps.values())
        return self.job.accumulated * work + self.fixed

    def memory(self, grid: GridSection) -> int:
        """Estimates how much memory a rank needs [B]."""
        share = _largest_share(self.job.about.shape[1:], grid)
        return self.held + int(self.job.samples_each(grid) * share * self.kept)

    def _exposed(self, exchange: HaloExchange, grid: GridSection, samples: int) -> float:
        """Estimates how long a rank waits for an exchange that begins at 0 [s]."""
        ratios = {axis: getattr(self.cut, axis) / getattr(grid, axis) for axis in SPATIAL_AXES}
        place = places_of(grid, self.job, self.machine)
        sizes = {}
        for axis, nbytes in exchange.messages.items():
            parts = getattr(grid, axis)
            if parts == 1:
                continue
            face = math.prod(ratio for other, ratio in ratios.items() if other != axis)
            # The outermost ranks along an axis have one neighbour, all others two.
            sizes[_neighbour(grid, axis)] = min(2, parts - 1) * int(samples * face * nbytes)
        sent = self.machine.exchange_seconds(sizes, 0, place)
        work = samples * math.prod(ratios.values()) * exchange.work
        return costs.Lane(self.machine.hidden.halos).exposed(work, sent, sent)


def roofline_estimate(job: GridJob, machine: Machine, ranks: int) -> RooflineEstimate:
    """Traces one sample twice: on one rank, and on two along every axis that can be cut."""
    device = machine.device
    count = 1
    try:
        trace = trace_step(sample := _samples_of(job, count), {}, device=device)
    except ValueError:  # batch norm of dense features needs two
        count = 2
        trace = trace_step(sample := _samples_of(job, count), {}, device=device)
    setting = machine.setting(ranks)
    maps: dict[VolumeShape, float] = defaultdict(float)
    fixed = setting.overhead.step
    for operator in trace.operators:
        seconds = setting.estimate(operator).seconds + setting.overhead.operator
        volumes = [spec.shape[2:] for spec in operator.call.tensors() if len(spec.shape) == 5]
        if volumes and operator.stage != "optimizer":
            maps[max(volumes, key=math.prod)] += seconds / count
        else:
            fixed += seconds
    held = trace.parameters + trace.gradients + trace.optimizer_state
    reserved = 0 if device == "cpu" else machine.reserved
    cut = GridSection()
    for axis in SPATIAL_AXES if ranks > 1 else ():
        if not refusal(GridSection.model_validate({axis: 2}), job):
            cut = cut.model_copy(update={axis: 2})
    return RooflineEstimate(
        job=job,
        machine=machine,
        maps=dict(maps),
        cut=cut,
        exchanges=tuple(_halo_exchanges(sample, cut, setting, device)) if cut.size > 1 else (),
        fixed=fixed,
        gradients=trace.gradients,
        kept=max(0, trace.peak - held) // count,
        held=held + reserved,
    )


def _samples_of(job: GridJob, count: int) -> Workload:
    work = job.workload()
    target = None if work.target is None else (count, *work.target[1:])
    return replace(work, inputs=(count, *work.inputs[1:]), target=target)


def _halo_exchanges(
    sample: Workload, cut: GridSection, setting: Setting, device: Device
) -> Iterator[HaloExchange]:
    """Traces the first rank's exchanges for each sample; none where some layer cannot be cut so."""
    count = sample.inputs[0]
    gradients_alone = replace(sample, optimizer=None)
    try:
        trace = trace_step(gradients_alone, cut.model_dump(), device=device)
    except (LayoutError, UnsupportedOp):
        return
    work: dict[int, float] = {}  # of exchanges under way
    for event in trace.events:
        if isinstance(event, Exchange):
            work[id(event)] = 0.0
        elif isinstance(event, LocalOperator):
            seconds = setting.estimate(event).seconds + setting.overhead.operator
            work = {key: spent + seconds for key, spent in work.items()}
        elif isinstance(event, Wait):
            found = event.exchange.by_peer
            messages = {
                axis: found.get(_neighbour(cut, axis), 0)
                for axis in SPATIAL_AXES
                if getattr(cut, axis) > 1
            }
            yield HaloExchange(
                {axis: nbytes // count for axis, nbytes in messages.items() if nbytes > 0},
                work.pop(id(event.exchange)) / count,
            )


def _exposed_input(job: GridJob, grid: GridSection, machine: Machine, step: float) -> float:
    """Computes how long a step of ``step`` [s] waits for its input [s]."""
    nbytes = job.step_bytes(grid)
    travels = job.travelling(grid)
    reads = job.reads_each_step
    return costs.exposed_input(machine, nbytes, grid.size, step, reads=reads, travels=travels)


def _largest_share(extents: VolumeShape, grid: GridSection) -> float:
    """Computes the largest share of a map that a rank has; too thin an axis is not cut."""
    cuts = [
        (extent, getattr(grid, axis)) for extent, axis in zip(extents, SPATIAL_AXES, strict=True)
    ]
    return math.prod(-(-n // parts) / n if n >= parts else 1.0 for n, parts in cuts)


def _neighbour(grid: GridSection, axis: str) -> int:
    """Returns the rank next to the first one along an axis."""
    return math.prod(getattr(grid, later) for later in AXES[AXES.index(axis) + 1 :])


@dataclass(frozen=True, slots=True)
class Candidate:
    """Holds the traced cost of a legal grid.

    ``seconds`` and ``memory`` are those of its slowest and of its fullest rank, of the ranks that
    were traced; ``samples`` are those of a step, on all ranks. ``reading`` [s] is what its input
    would take if nothing were kept (Mathuriya et al. 2018, equation 1).
    """

    grid: GridSection
    samples: int
    seconds: costs.Breakdown
    memory: costs.RankMemory
    reading: float
    cost: costs.StepCost
    notes: tuple[str, ...] = ()
    saving: Memory = "none"
    """Tells how memory is saved: as the recipe says, or what was chosen for ``memory: auto``."""

    @property
    def throughput(self) -> float:
        return self.samples / self.seconds.total

    def fits(self, limit: int) -> bool:
        """Tells if a rank needs no more than so much memory [B]."""
        return self.memory.total <= limit


def trace_grid(
    job: GridJob, grid: GridSection, machine: Machine, most: float = math.inf
) -> list[Trace]:
    """Traces the steps of `deciding_ranks`, of which none may have more than ``most`` [B].

    Raises what `trace_step` does.
    """
    work = job.workload()
    ranks = deciding_ranks(job, grid, machine)
    return [trace_step(work, grid.model_dump(), rank, machine.device, most) for rank in ranks]


def deciding_ranks(job: GridJob, grid: GridSection, machine: Machine) -> list[int]:
    """Lists the ranks that decide how long a step takes, and how much memory.

    That is the busiest, on the longest way to its neighbours; where the shards of an axis differ,
    also the first, whose are largest.
    """
    extents = grid.model_dump()
    even = all(
        extent % extents[axis] == 0
        for extent, axis in zip(job.about.shape[1:], SPATIAL_AXES, strict=True)
    )
    # Where shards differ the first ranks have one element more, but perhaps fewer neighbours.
    slowest = slowest_rank(extents, job.inputs, machine)
    return sorted({slowest} if even else {0, slowest})


def trace_one(job: GridJob, grid: GridSection, machine: Machine, bounds: PlanBounds) -> Candidate:
    """Traces one grid and computes the cost of a step on it.

    For ``memory: auto`` each way to save memory is traced: it is the fastest of those that fit, or
    the one that needs least.

    Raises what `trace_step` does.
    """
    if job.recipe.memory == "auto":
        ways = [job.with_recipe(memory=way) for way in get_args(Memory)]
        found = [trace_one(one, grid, machine, bounds) for one in ways]
        # Slabs have a price of their own: on small volumes they may need more than they save.
        most = found[0].memory.total  # of none: what should save memory needs no more
        found = [one for one in found if one.memory.total <= most]
        fitting = [one for one in found if one.fits(bounds.nbytes)]
        if fitting:
            return min(fitting, key=lambda one: one.seconds.total)
        return min(found, key=lambda one: one.memory.total)
    return _candidate(job, grid, machine, bounds, trace_grid(job, grid, machine))


def trace_fitting(
    job: GridJob, grid: GridSection, machine: Machine, bounds: PlanBounds
) -> Candidate | None:
    """Does as `trace_one`; None, as soon as a rank needs too much memory, if the grid is too large.

    Raises what `trace_step` does.
    """
    if job.recipe.memory == "auto":
        found = trace_one(job, grid, machine, bounds)
        return found if found.fits(bounds.nbytes) else None
    # What a rank needs is at least this and, at any moment, all tensors of its trace.
    beside = costs.rank_memory(Trace(0), machine, grid.size, host_memory(job, grid, bounds)).total
    try:
        traces = trace_grid(job, grid, machine, bounds.nbytes - beside)
    except TooLargeError:
        return None
    found = _candidate(job, grid, machine, bounds, traces)
    return found if found.fits(bounds.nbytes) else None


def _candidate(
    job: GridJob, grid: GridSection, machine: Machine, bounds: PlanBounds, traces: list[Trace]
) -> Candidate:
    """Computes the cost of a step from the traces of the ranks that decide."""
    assert job.recipe.memory != "auto"  # each way to save memory has its own traces
    place = places_of(grid, job, machine)
    steps = [costs.step_cost(trace, machine, grid.size, place) for trace in traces]
    slowest = max(steps, key=lambda step: step.seconds.total)
    seconds = _accumulated(slowest.seconds, job.accumulated)
    host = host_memory(job, grid, bounds)
    memories = [costs.rank_memory(trace, machine, grid.size, host) for trace in traces]
    readers = min(job.batch, grid.size) if job.whole_each(grid) else grid.size
    reading = machine.read_seconds(job.read_bytes(grid), readers)
    seconds = replace(seconds, input=_exposed_input(job, grid, machine, seconds.total))
    return Candidate(
        grid,
        job.batch * job.accumulated,
        seconds,
        max(memories, key=lambda memory: memory.total),
        reading,
        slowest,
        tuple(dict.fromkeys(note for trace in traces for note in trace.notes)),
        job.recipe.memory,
    )


def host_memory(job: GridJob, grid: GridSection, bounds: PlanBounds) -> costs.RankMemory:
    """Computes a rank's memory beside its step: mini-batches to come, and what the store keeps.

    The store keeps what is shown in an epoch, as far as its budget goes: by default half of the
    memory that a rank may have. A rank that reads whole samples also has the one that it reads, and
    the boxes of two steps that it sends.
    """
    data = job.recipe.data
    box = job.box_bytes(job.box_extents(grid))
    batch = job.samples_each(grid) * box
    policy = PrefetchPolicy(data.prefetch, data.prefetch_bytes)
    depth = policy.batches(batch, planned_device(job.recipe))
    ahead = depth * batch
    kept, holders = box, grid.data
    if whole := job.whole_each(grid):
        kept, holders = job.box_bytes(job.about.shape[1:]), grid.size
        ahead += kept + 2 * whole * (grid.size // grid.data - 1) * box
    store = 0
    if data.mode != "direct":
        budget = int(MEMORY_SHARE * bounds.nbytes) if data.budget is None else data.budget
        store = min(budget // kept, -(-job.shown // holders)) * kept
    return costs.RankMemory(ahead=ahead, store=store, process=bounds.process)


def _accumulated(seconds: costs.Breakdown, count: int) -> costs.Breakdown:
    """Adds up a step over several mini-batches; gradients travel with the last one."""
    once = {"gradients", "optimizer"}
    parts = seconds.as_dict().items()
    return costs.Breakdown(**{name: part if name in once else count * part for name, part in parts})


TRACED = 8  # the grids that are traced unless all are asked for, the roughly fastest ones


@dataclass(frozen=True, slots=True)
class RefusedGrid:
    """Names a grid that cannot be, and why."""

    grid: GridSection
    reason: str


@dataclass(frozen=True)
class GridPlan:
    """Ranks all grids of ``ranks`` ranks: ``traced`` ones by time, those that fit first.

    ``untraced`` are legal ones that are likely to be slower, by ``first``, the rough estimate.
    """

    job: GridJob
    machine: Machine
    ranks: int
    bounds: PlanBounds
    traced: tuple[Candidate, ...]
    untraced: tuple[GridSection, ...]
    refused: tuple[RefusedGrid, ...]
    first: RooflineEstimate

    @property
    def best(self) -> Candidate | None:
        """Returns the fastest grid that fits; None where none does."""
        return next((one for one in self.traced if one.fits(self.bounds.nbytes)), None)

    @property
    def smallest(self) -> Candidate | None:
        """Returns the traced grid that needs the least memory."""
        return min(self.traced, key=lambda one: one.memory.total, default=None)

    def efficiency(self, one: Candidate) -> float:
        """Compares the time of one rank for the same samples with that of all ranks together.

        That one is taken to have the memory, and to be as fast as one of so many.
        """
        return self.first.single_rank_seconds / (self.ranks * one.seconds.total)

    def binds(self, one: Candidate) -> str:
        """Names what keeps a grid from being better: memory, or else what takes longest."""
        if not one.fits(self.bounds.nbytes):
            return "memory"
        spent = one.seconds
        parts = {
            "compute": spent.compute,
            "overhead": spent.overhead,
            "halo": spent.halos,
            "all-reduce": spent.statistics + spent.gradients,
            "input": spent.input,
        }
        return max(parts, key=lambda name: parts[name])


def make_plan(job: GridJob, machine: Machine, ranks: int, bounds: PlanBounds) -> GridPlan:
    """Ranks the grids of so many ranks.

    1. Every grid is tried for its partition. 2. One sample is traced on one rank, from which the
    rough time and memory of every grid follow. 3. The `TRACED` grids that seem fastest are traced
    as they are, of those that seem to fit first; with ``everything`` all. Where none of them fits,
    those are traced that seem to need least, until one fits or as many have been tried. The result
    depends on nothing but the arguments: no clock is read. No grid stands for another one, for
    turning a grid turns blocks, and kernels are not as fast along every dim.

    Raises:
        LayoutError: no grid of so many ranks can be.
        UnsupportedOp: the network has an operator that cannot be traced or cut.
    """
    refused = []
    legal = []
    for grid in grids(ranks):
        reason = refusal(grid, job)
        if reason:
            refused.append(RefusedGrid(grid, reason))
        else:
            legal.append(grid)
    if not legal:
        raise LayoutError(
            f"no grid of {ranks} ranks is possible; one of the reasons:\n    {refused[-1].reason}"
        )
    first = roofline_estimate(job, machine, ranks)
    limit = bounds.nbytes

    def promise(grid: GridSection) -> tuple[bool, float, str]:
        # The estimate of memory is rough: only what is clearly too much comes last.
        too_large = bounds.process + first.memory(grid) > 1.2 * limit
        return too_large, first.seconds(grid), words_of(grid)

    pending = sorted(legal, key=promise)
    traced: list[Candidate] = []
    while pending and not _enough(traced, bounds):
        if len(traced) == TRACED and not bounds.everything:  # none of them fits
            pending.sort(key=lambda grid: (first.memory(grid), words_of(grid)))
        grid = pending.pop(0)
        try:
            traced.append(trace_one(job, grid, machine, bounds))
        except (LayoutError, UnsupportedOp) as error:
            refused.append(RefusedGrid(grid, str(error)))
    if not traced:
        raise UnsupportedOp(refused[-1].reason)
    traced.sort(key=lambda one: (not one.fits(limit), one.seconds.total, words_of(one.grid)))
    return GridPlan(
        job=job,
        machine=machine,
        ranks=ranks,
        bounds=bounds,
        traced=tuple(traced),
        untraced=tuple(pending),
        refused=tuple(refused),
        first=first,
    )


def _enough(traced: list[Candidate], bounds: PlanBounds) -> bool:
    """Tells if no more grids have to be traced."""
    if bounds.everything or len(traced) < TRACED:
        return False
    return len(traced) >= 2 * TRACED or any(one.fits(bounds.nbytes) for one in traced)


MOST_RANKS = 4096  # where the search for the least number of ranks ends
_MOST_TRACED = 12  # the most grids that are traced in that search
MEMORY_TOLERANCE = 1.03  # times the limit: rough memory of grids that are tried


@dataclass(frozen=True, slots=True)
class RecipeChange:
    """Compares a grid before and after one change of the recipe."""

    override: str
    before: Candidate
    after: Candidate


def suggested_changes(plan: GridPlan) -> list[RecipeChange]:
    """Tries to save memory, and half precision, on the best grid, or on that of least memory."""
    before = plan.best or plan.smallest
    if before is None:
        return []
    found = []
    changes = [("memory", way) for way in get_args(Memory) if way != "none"]
    for key, other in (*changes, ("precision", "bf16")):
        if getattr(plan.job.recipe, key) in ("none", "float32", "tf32"):
            job = plan.job.with_recipe(**{key: other})
            after = trace_one(job, before.grid, plan.machine, plan.bounds)
            found.append(RecipeChange(f"{key}={other}", before, after))
    return found


@dataclass(frozen=True, slots=True)
class LeastRanks:
    """Holds the grid of the fewest ranks that was found to fit; None: none was.

    ``proven``: every grid of fewer ranks was traced and is too large. If not, the rest was left
    out by its rough memory alone.
    """

    found: Candidate | None
    proven: bool


def least_ranks(
    first: RooflineEstimate, bounds: PlanBounds, known: Candidate | None = None
) -> LeastRanks:
    """Finds the grid of the fewest ranks that fits, up to `MOST_RANKS` ranks.

    In the order of their numbers of ranks, those grids are traced that take least of so many, and
    of which ``first``, the rough estimate, says that they may fit; it is ``known``, a grid that
    fits, if there are none of fewer ranks. Then all grids of fewer ranks are traced, if these are
    no more than `_MOST_TRACED`.
    """
    job = first.job
    best = _roughly_least(first, bounds, known)
    if best is None:
        # What a rank keeps on every grid alike is a proof, if that alone is too much.
        return LeastRanks(None, proven=first.held + bounds.process > bounds.nbytes)
    fewer = [
        grid
        for count in range(1, min(best.grid.size, _MOST_TRACED + 2))
        for grid in grids(count)
        if not refusal(grid, job)
    ]
    if best.grid.size > _MOST_TRACED + 1 or len(fewer) > _MOST_TRACED:
        return LeastRanks(best, proven=False)
    for grid in fewer:
        with suppress(LayoutError, UnsupportedOp):
            found = trace_fitting(job, grid, first.machine, bounds)
            if found is not None:
                return LeastRanks(found, proven=True)
    return LeastRanks(best, proven=True)


def _roughly_least(
    first: RooflineEstimate, bounds: PlanBounds, known: Candidate | None
) -> Candidate | None:
    """Finds a grid that fits, of few ranks, as `least_ranks` says."""
    room = MEMORY_TOLERANCE * (bounds.nbytes - bounds.process)
    if room <= first.held:
        return known
    # As if all that one rank keeps were cut evenly: by this estimate fewer ranks are too few.
    ranks = math.floor((first.memory(GridSection()) - first.held) / (room - first.held))
    tried = 0
    most = MOST_RANKS if known is None else known.grid.size - 1
    for count in range(max(1, ranks), most + 1):
        possible = [grid for grid in grids(count) if not refusal(grid, first.job)]
        grid = min(possible, key=first.memory, default=None)
        if grid is None or first.memory(grid) > room:
            continue
        found = trace_fitting(first.job, grid, first.machine, bounds)
        if found is not None:
            return found
        tried += 1
        if tried == _MOST_TRACED:
            break
    return known
