"""A plan as JSON: the numbers that the table shows, and more."""

from __future__ import annotations

from typing import Any

from hyperslab.plan.advice import Change
from hyperslab.plan.candidate import Candidate, efficiency
from hyperslab.plan.search import GridPlan

FORMAT_OF_PLANS = 1


def document(plan: GridPlan, changes: list[Change], least: Candidate | None) -> dict[str, Any]:
    """Times in s, sizes in B, by plain names; ``grids`` as they are ranked."""
    best = plan.best
    return {
        "format": FORMAT_OF_PLANS,
        "machine": plan.machine.name,
        "ranks": plan.ranks,
        "samples_per_step": plan.job.batch * plan.job.accumulated,
        "volume": list(plan.job.about.shape),
        "assumed": plan.job.assumed,
        "memory_limit": {"bytes": plan.limit.nbytes, "reason": plan.limit.reason},
        "best": None if best is None else best.grid.model_dump(),
        "grids": [_candidate(plan, one) for one in plan.traced],
        "not_traced": [
            {
                "grid": one.grid.model_dump(),
                "rough_seconds": one.seconds,
                "rough_bytes": one.memory,
            }
            for one in plan.untraced
        ],
        "illegal": [{"grid": one.grid.model_dump(), "reason": one.reason} for one in plan.refused],
        "changes": [
            {
                "override": change.override,
                "grid": change.before.grid.model_dump(),
                "step_seconds": change.after.seconds.total,
                "bytes": change.after.memory.total,
                "fits": change.after.fits(plan.limit.nbytes),
            }
            for change in changes
        ],
        "least_ranks": None
        if least is None
        else {
            "ranks": least.grid.size,
            "grid": least.grid.model_dump(),
            "bytes": least.memory.total,
        },
    }


def _candidate(plan: GridPlan, one: Candidate) -> dict[str, Any]:
    return {
        "grid": one.grid.model_dump(),
        "fits": one.fits(plan.limit.nbytes),
        "step_seconds": one.seconds.total,
        "samples_per_second": one.throughput,
        "efficiency": efficiency(plan.alone, one),
        "binds": binds(plan, one),
        "seconds": one.seconds.as_dict(),
        "bytes": one.memory.total,
        "memory": one.memory.as_dict(),
        "reading_seconds": one.reading,
        "not_measured": one.cost.guessed,
        "not_traced": one.cost.left_out,
        "not_traced_share": one.cost.left_out_share,
        "notes": list(one.notes),
    }


def binds(plan: GridPlan, one: Candidate) -> str:
    """What keeps a grid from being better: memory if it does not fit, else what takes longest."""
    return one.binds if one.fits(plan.limit.nbytes) else "memory"
