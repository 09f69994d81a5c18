"""Searches for the best grid: estimates every one roughly, traces the promising ones, ranks them.

In reading order: how much memory a rank may have (`PlanBounds`); `roofline_estimate`, a first
look at all grids from one traced sample and geometry alone; `trace_one`, what the step of one
traced grid costs; `make_plan`, the ranking; `least_ranks` and `suggested_changes`, what else
would help.

The roofline estimate is no bound: it takes operators to be as fast for a block as for the whole.
It only chooses which grids are traced.
"""

from __future__ import annotations

import math
import resource
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch

from hyperslab.comm.grid import AXES, SPATIAL_AXES
from hyperslab.data.store import MEMORY_SHARE
from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.parallel.parallelize import Memory
from hyperslab.planner.cost import Breakdown, Lane, RankMemory, StepCost, rank_memory, step_cost
from hyperslab.planner.grids import grids, refusal, slowest_rank, words_of
from hyperslab.planner.job import GridJob, VolumeShape
from hyperslab.planner.machine import Machine, Setting
from hyperslab.planner.trace import Exchange, LocalOperator, Trace, Wait, Workload, trace_step
from hyperslab.planner.trace.step import Device
from hyperslab.recipe.schema import GridSection
from hyperslab.util.free_memory import free_memory
from hyperslab.util.torch_internals import import_compiler

PROCESS_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Holds the memory limit of one rank [B], and where it comes from."""

    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """Bounds a plan: a rank's memory, what an empty process takes of it [B], the effort."""

    limit: MemoryLimit
    process: int = 0
    everything: bool = False


def host_limit(ranks: int, device: str) -> MemoryLimit:
    """Finds the memory that each of so many ranks on this host could have.

    Of a GPU its memory; else its part of what is free (of the machine, and of its control groups)
    together with what a process takes that is there already, or of the addresses that it may have
    (RLIMIT_AS), if that is less.
    """
    if device == "cuda" and torch.cuda.is_available():
        return MemoryLimit(torch.cuda.mem_get_info()[1], "the memory of the GPU")
    own = process_bytes()
    free = free_memory() // ranks + own
    limit = MemoryLimit(free, "a rank's part of the memory that is free here")
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        left = max(0, addresses - _status_bytes("VmSize")) + own
        if left < limit.nbytes:
            reason = "what the limit of a process's address space leaves (ulimit -v)"
            return MemoryLimit(left, reason)
    return limit


def process_bytes() -> int:
    """Measures the memory [B] of this process, with training's imports and no tensors."""
    import_compiler()  # as a process's first optimizer does
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int:
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
        reduced = self.machine.all_reduce_seconds(self.gradients, grid.size)
        late = Lane(self.machine.hidden.gradients).exposed(work, reduced, reduced)
        return self.job.accumulated * (work + exposed) + late + self.fixed

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
        sent = 0.0
        for axis, nbytes in exchange.messages.items():
            parts = getattr(grid, axis)
            face = math.prod(ratio for other, ratio in ratios.items() if other != axis)
            # The outermost ranks along an axis have one neighbour, all others two.
            sent += min(2, parts - 1) * self.machine.send_seconds(
                int(samples * face * nbytes), 0, _neighbour(grid, axis)
            )
        work = samples * math.prod(ratios.values()) * exchange.work
        return Lane(self.machine.hidden.halos).exposed(work, sent, sent)


def roofline_estimate(job: GridJob, machine: Machine, ranks: int) -> RooflineEstimate:
    """Traces one sample twice: on one rank, and on two along every axis that can be cut."""
    work = job.workload()
    target = None if work.target is None else (1, *work.target[1:])
    sample = replace(work, inputs=(1, *work.inputs[1:]), target=target)
    device = device_of_machine(machine)
    trace = trace_step(sample, {}, device=device)
    setting = machine.setting(ranks)
    maps: dict[VolumeShape, float] = defaultdict(float)
    fixed = setting.overhead.step
    for operator in trace.operators:
        seconds = setting.estimate(operator).seconds + setting.overhead.operator
        volumes = [spec.shape[2:] for spec in operator.call.tensors() if len(spec.shape) == 5]
        if volumes and operator.stage != "optimizer":
            maps[max(volumes, key=math.prod)] += seconds
        else:
            fixed += seconds
    held = trace.parameters + trace.gradients + trace.optimizer_state
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
        kept=max(0, trace.peak - held),
        held=held,
    )


def _halo_exchanges(
    sample: Workload, cut: GridSection, setting: Setting, device: Device
) -> Iterator[HaloExchange]:
    """Traces the first rank's exchanges; there are none where some layer cannot be cut so."""
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
                {axis: nbytes for axis, nbytes in messages.items() if nbytes > 0},
                work.pop(id(event.exchange)),
            )


def device_of_machine(machine: Machine) -> Device:
    """Returns the kind of the machine's devices, as a trace takes it."""
    return "cpu" if machine.device == "cpu" else "cuda"


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
    seconds: Breakdown
    memory: RankMemory
    reading: float
    cost: StepCost
    notes: tuple[str, ...] = ()
    saving: Memory = "none"
    """Tells how memory is saved: as the recipe says, or what was chosen for ``memory: auto``."""

    @property
    def throughput(self) -> float:
        """Returns the samples a second."""
        return self.samples / self.seconds.total

    def fits(self, limit: int) -> bool:
        """Tells if a rank needs no more than so much memory [B]."""
        return self.memory.total <= limit


def trace_grid(job: GridJob, grid: GridSection, machine: Machine) -> list[Trace]:
    """Traces the steps of the ranks that decide.

    That is the busiest, on the longest way to its neighbours; where the shards of an axis differ,
    also the first, whose are largest.
    Raises what `trace_step` does.
    """
    work = job.workload()
    extents = grid.model_dump()
    even = all(
        extent % extents[axis] == 0
        for extent, axis in zip(job.about.shape[1:], SPATIAL_AXES, strict=True)
    )
    slowest = slowest_rank(extents, job.inputs, machine)
    ranks = sorted({slowest} if even else {0, slowest})
    return [trace_step(work, extents, rank, device_of_machine(machine)) for rank in ranks]


def trace_one(job: GridJob, grid: GridSection, machine: Machine, bounds: PlanBounds) -> Candidate:
    """Traces one grid and computes the cost of a step on it.

    For ``memory: auto`` each way to save memory is traced: it is the fastest of those that fit, or
    the one that needs least.

    Raises what `trace_step` does.
    """
    if job.recipe.memory == "auto":
        ways = [job.with_recipe(memory=way) for way in get_args(Memory)]
        found = [trace_one(one, grid, machine, bounds) for one in ways]
        most = found[0].memory.total  # of none: what should save memory needs no more
        found = [one for one in found if one.memory.total <= most]
        fitting = [one for one in found if one.fits(bounds.limit.nbytes)]
        if fitting:
            return min(fitting, key=lambda one: one.seconds.total)
        return min(found, key=lambda one: one.memory.total)
    traces = trace_grid(job, grid, machine)
    costs = [step_cost(trace, machine, grid.size) for trace in traces]
    slowest = max(costs, key=lambda cost: cost.seconds.total)
    seconds = _accumulated(slowest.seconds, job.accumulated)
    host = host_memory(job, grid, bounds)
    memories = [rank_memory(trace, machine, grid.size, host) for trace in traces]
    reading = machine.read_seconds(job.step_bytes(grid), grid.size)
    if job.reads_each_step:  # ahead of the step, which hides as much as it takes itself
        seconds = replace(seconds, input=max(0.0, reading - seconds.total))
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


def host_memory(job: GridJob, grid: GridSection, bounds: PlanBounds) -> RankMemory:
    """Computes a rank's memory beside its step: mini-batches, and what the store keeps.

    The store keeps what is shown in an epoch, as far as its budget goes: by default half of the
    memory, which is ``limit`` [B] a rank.
    """
    data = job.recipe.data
    box = job.box_bytes(job.box_extents(grid))
    batch = job.samples_each(grid) * box
    depth = min(data.prefetch, data.prefetch_bytes // batch)
    kept = 0
    if data.mode != "direct":
        budget = int(MEMORY_SHARE * bounds.limit.nbytes) if data.budget is None else data.budget
        kept = min(budget // box, -(-job.shown // grid.data)) * box
    return RankMemory(ahead=(1 + depth) * batch, store=kept, process=bounds.process)


def _accumulated(seconds: Breakdown, count: int) -> Breakdown:
    """Adds up a step over several mini-batches; gradients travel with the last one."""
    once = {"gradients", "optimizer"}
    parts = seconds.as_dict().items()
    return Breakdown(**{name: part if name in once else count * part for name, part in parts})


TRACED = 8
"""Counts the grids that are traced unless all are asked for, the roughly fastest ones."""


@dataclass(frozen=True, slots=True)
class UntracedGrid:
    """Holds a legal grid that is likely to be slower, with its rough estimates: [s] and [B]."""

    grid: GridSection
    seconds: float
    memory: int


@dataclass(frozen=True, slots=True)
class RefusedGrid:
    """Names a grid that cannot be, and why."""

    grid: GridSection
    reason: str


@dataclass(frozen=True)
class GridPlan:
    """Ranks all grids of ``ranks`` ranks: ``traced`` ones by time, those that fit first."""

    job: GridJob
    machine: Machine
    ranks: int
    limit: MemoryLimit
    traced: tuple[Candidate, ...]
    untraced: tuple[UntracedGrid, ...]
    refused: tuple[RefusedGrid, ...]
    first: RooflineEstimate

    @property
    def best(self) -> Candidate | None:
        """Returns the fastest grid that fits; None where none does."""
        return next((one for one in self.traced if one.fits(self.limit.nbytes)), None)

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
        if not one.fits(self.limit.nbytes):
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
    limit = bounds.limit.nbytes

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
        limit=bounds.limit,
        traced=tuple(traced),
        untraced=tuple(
            UntracedGrid(grid, first.seconds(grid), first.memory(grid)) for grid in pending
        ),
        refused=tuple(refused),
        first=first,
    )


def _enough(traced: list[Candidate], bounds: PlanBounds) -> bool:
    """Tells if no more grids have to be traced."""
    if bounds.everything or len(traced) < TRACED:
        return False
    return len(traced) >= 2 * TRACED or any(one.fits(bounds.limit.nbytes) for one in traced)


MOST_RANKS = 4096
"""Limits the search for the least number of ranks."""

_MOST_TRACED = 12
"""Limits the grids that are traced in that search."""

MEMORY_TOLERANCE = 1.03
"""Admits grids to that search whose rough memory is up to so many times the limit."""


@dataclass(frozen=True, slots=True)
class RecipeChange:
    """Compares a grid before and after one change of the recipe."""

    override: str
    before: Candidate
    after: Candidate


def suggested_changes(plan: GridPlan, bounds: PlanBounds) -> list[RecipeChange]:
    """Tries to save memory, and half precision, on the best grid, or on that of least memory."""
    before = plan.best or plan.smallest
    if before is None:
        return []
    found = []
    changes = [("memory", way) for way in get_args(Memory) if way != "none"]
    for key, other in (*changes, ("precision", "bf16")):
        if getattr(plan.job.recipe, key) in ("none", "float32"):
            job = plan.job.with_recipe(**{key: other})
            after = trace_one(job, before.grid, plan.machine, bounds)
            found.append(RecipeChange(f"{key}={other}", before, after))
    return found


def least_ranks(
    job: GridJob,
    machine: Machine,
    bounds: PlanBounds,
    first: RooflineEstimate,
    known: Candidate | None = None,
) -> Candidate | None:
    """Finds the grid of the fewest ranks that fits; None up to `MOST_RANKS` ranks.

    In the order of their numbers of ranks, those grids are traced that take least of so many, and
    of which ``first``, the rough estimate, says that they may fit; it is ``known``, a grid that
    fits, if there are none of fewer ranks.
    """
    room = MEMORY_TOLERANCE * (bounds.limit.nbytes - bounds.process)
    if room <= first.held:
        return known
    ranks = math.floor((first.memory(GridSection()) - first.held) / (room - first.held))
    tried = 0
    most = MOST_RANKS if known is None else known.grid.size - 1
    for count in range(max(1, ranks), most + 1):
        possible = [grid for grid in grids(count) if not refusal(grid, job)]
        grid = min(possible, key=first.memory, default=None)
        if grid is None or first.memory(grid) > room:
            continue
        found = trace_one(job, grid, machine, bounds)
        if found.fits(bounds.limit.nbytes):
            return found
        tried += 1
        if tried == _MOST_TRACED:
            break
    return known
