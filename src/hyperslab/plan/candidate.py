"""One grid of a plan: what its step costs, whether it fits, what binds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.cost.breakdown import Breakdown
from hyperslab.cost.feed import input_wait
from hyperslab.cost.memory import HostMemory, RankMemory, rank_memory
from hyperslab.cost.step import StepCost, step_cost
from hyperslab.data.store.budget import SHARE
from hyperslab.machine import Machine
from hyperslab.plan.grids import box_extents, samples_each
from hyperslab.plan.job import GridJob
from hyperslab.plan.limits import Bounds
from hyperslab.plan.placed import slowest_rank
from hyperslab.plan.rough import device_of_machine
from hyperslab.recipe.schema import GridSection
from hyperslab.trace import Trace, trace_step


@dataclass(frozen=True, slots=True)
class Candidate:
    """A legal grid, traced.

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

    @property
    def throughput(self) -> float:
        """[samples/s]"""
        return self.samples / self.seconds.total

    @property
    def binds(self) -> str:
        """What takes most of the step, memory left aside."""
        spent = self.seconds
        parts = {
            "compute": spent.compute,
            "overhead": spent.overhead,
            "halo": spent.halos,
            "all-reduce": spent.statistics + spent.gradients,
            "input": spent.input,
        }
        return max(parts, key=lambda name: parts[name])

    def fits(self, limit: int) -> bool:
        """Whether a rank needs no more than so much memory [B]."""
        return self.memory.total <= limit


def trace_grid(job: GridJob, grid: GridSection, machine: Machine) -> list[Trace]:
    """The steps of the ranks that decide.

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


def weigh(
    job: GridJob, grid: GridSection, machine: Machine, traces: Sequence[Trace], bounds: Bounds
) -> Candidate:
    """What a step on a grid costs."""
    costs = [step_cost(trace, machine, grid.size) for trace in traces]
    slowest = max(costs, key=lambda cost: cost.seconds.total)
    seconds = _accumulated(slowest.seconds, job.accumulated)
    host = host_memory(job, grid, bounds)
    memories = [rank_memory(trace, machine, grid.size, host) for trace in traces]
    reading = reading_seconds(job, grid, machine)
    waiting = input_wait(reading, seconds.total) if read_each_step(job) else 0.0
    return Candidate(
        grid,
        job.batch * job.accumulated,
        replace(seconds, input=waiting),
        max(memories, key=lambda memory: memory.total),
        reading,
        slowest,
        tuple(dict.fromkeys(note for trace in traces for note in trace.notes)),
    )


def host_memory(job: GridJob, grid: GridSection, bounds: Bounds) -> HostMemory:
    """Of a rank, beside its step: mini-batches in their storage type, and what the store keeps.

    The store keeps what is shown in an epoch, as far as its budget goes: by default half of the
    memory, which is ``limit`` [B] a rank.
    """
    data = job.recipe.data
    box = job.box_bytes(box_extents(grid, job))
    batch = samples_each(grid, job) * box
    depth = min(data.prefetch, data.prefetch_bytes // batch)
    kept = 0
    if data.mode != "direct":
        budget = int(SHARE * bounds.limit.nbytes) if data.budget is None else data.budget
        kept = min(budget // box, -(-job.shown // grid.data)) * box
    return HostMemory(ahead=(1 + depth) * batch, store=kept, process=bounds.process)


def read_each_step(job: GridJob) -> bool:
    """Whether files are read in every epoch, and not in the first one alone."""
    return job.recipe.data.mode == "direct" and job.recipe.data.synthetic is None


def reading_seconds(job: GridJob, grid: GridSection, machine: Machine) -> float:
    """Of a step's input from files, each rank its boxes [s]."""
    boxes = job.accumulated * samples_each(grid, job) * job.box_bytes(box_extents(grid, job))
    return machine.read_seconds(boxes, grid.size)


def _accumulated(seconds: Breakdown, count: int) -> Breakdown:
    """Of a step over several mini-batches; gradients travel with the last one."""
    once = {"gradients", "optimizer"}
    times = {name: 1 if name in once else count for name in seconds.as_dict()}
    return Breakdown(**{name: times[name] * spent for name, spent in seconds.as_dict().items()})


def efficiency(alone: float, candidate: Candidate) -> float:
    """The share of all ranks' time that one alone would need for the same samples, ``alone`` [s].

    That one is taken to have the memory, and to be as fast as one of so many.
    """
    return alone / (candidate.grid.size * candidate.seconds.total)
