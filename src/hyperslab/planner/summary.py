"""Presents a plan: as a table and in words for the terminal, as JSON, and as a figure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from hyperslab.comm.placement import axes_in_nodes, places
from hyperslab.planner import search
from hyperslab.planner.calibrate import instruction_set, processor_name
from hyperslab.planner.cost import MOST_UNKNOWN, Breakdown, RankMemory
from hyperslab.planner.machine import Machine

PLAN_FORMAT = 1


def plan_document(
    plan: search.GridPlan, changes: list[search.RecipeChange], least: search.LeastRanks
) -> dict[str, Any]:
    """Lists a plan's numbers by plain names: times in s, sizes in B, ``grids`` as ranked."""
    best = plan.best
    fewest = least.found
    return {
        "format": PLAN_FORMAT,
        "machine": plan.machine.name,
        "ranks": plan.ranks,
        "samples_per_step": plan.job.batch * plan.job.accumulated,
        "volume": list(plan.job.about.shape),
        "assumed": plan.job.assumed,
        "memory_limit": {"bytes": plan.bounds.nbytes, "reason": plan.bounds.reason},
        "best": None if best is None else best.grid.model_dump(),
        "grids": [_candidate_values(plan, one) for one in plan.traced],
        "not_traced": [
            {
                "grid": grid.model_dump(),
                "rough_seconds": plan.first.seconds(grid),
                "rough_bytes": plan.first.memory(grid),
            }
            for grid in plan.untraced
        ],
        "illegal": [{"grid": one.grid.model_dump(), "reason": one.reason} for one in plan.refused],
        "changes": [
            {
                "override": change.override,
                "grid": change.before.grid.model_dump(),
                "step_seconds": change.after.seconds.total,
                "bytes": change.after.memory.total,
                "fits": change.after.fits(plan.bounds.nbytes),
            }
            for change in changes
        ],
        "least_ranks": None
        if fewest is None
        else {
            "ranks": fewest.grid.size,
            "grid": fewest.grid.model_dump(),
            "bytes": fewest.memory.total,
            "proven": least.proven,
        },
    }


def _candidate_values(plan: search.GridPlan, one: search.Candidate) -> dict[str, Any]:
    return {
        "grid": one.grid.model_dump(),
        "fits": one.fits(plan.bounds.nbytes),
        "step_seconds": one.seconds.total,
        "samples_per_second": one.throughput,
        "efficiency": plan.efficiency(one),
        "binds": plan.binds(one),
        "seconds": one.seconds.as_dict(),
        "halo_bytes": one.cost.halo_bytes,
        "bytes": one.memory.total,
        "memory": one.memory.as_dict(),
        "reading_seconds": one.reading,
        "not_measured": one.cost.guessed,
        "unknown": one.cost.unknown,
        "not_traced": one.cost.left_out,
        "not_traced_share": one.cost.left_out_share,
        "notes": list(one.notes),
    }


_COLUMNS = ("grid", "step", "samples/s", "efficiency", "memory", "binds", "")
GRIDS_SHOWN = 12  # the most grids that the table has


def ranking_table(plan: search.GridPlan) -> Table:
    """Makes the table of the first `GRIDS_SHOWN` traced grids as they are ranked."""
    shown = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        words = column in ("grid", "binds", "")
        shown.add_column(column, justify="left" if words else "right", no_wrap=True)
    for one in plan.traced[:GRIDS_SHOWN]:
        fits = one.fits(plan.bounds.nbytes)
        shown.add_row(
            search.words_of(one.grid),
            step_text(one),
            f"{one.throughput:.3g}" if one.cost.known else "",
            f"{plan.efficiency(one):.0%}" if one.cost.known else "",
            bytes_text(one.memory.total),
            plan.binds(one),
            "best" if one is plan.best else "" if fits else "too large",
        )
    return shown


def step_text(one: search.Candidate) -> str:
    """Says how long a step takes, or that nobody knows."""
    return time_text(one.seconds.total) if one.cost.known else "unknown"


def unknown_time(one: search.Candidate, machine: Machine) -> str:
    """Says why nobody knows how long a step takes; "" if that is known."""
    if one.cost.known:
        return ""
    most = f"{MOST_UNKNOWN:.0%} and more"
    return f"the time is not known: {machine.name} has measured nothing like {most} of the step"


def other_processor(machine: Machine) -> str:
    """Says that a machine's times are not those of this one; "" if they are, as far as is known."""
    there = machine.processor, machine.instructions
    here = processor_name(), instruction_set() if machine.instructions else ""
    if not machine.measured or there == here:
        return ""
    was, now = (f"{name} ({kind})" if kind else name for name, kind in (there, here))
    return f"{machine.name} was measured on {was}, and this is {now}: the times are for the former"


def plan_opening(plan: search.GridPlan) -> str:
    """Says what is planned, on what, in one line."""
    job = plan.job
    volume = " x ".join(map(str, job.about.shape))
    return (
        f"{ranks_text(plan.ranks)} of {plan.machine.name}: {job.batch * job.accumulated} samples "
        f"of {volume} a step, {bytes_text(plan.bounds.nbytes)} a rank ({plan.bounds.reason})"
    )


NONE_FOUND = f"none of the few traced grids of up to {search.MOST_RANKS} ranks fits"
"""Says what `least_ranks` has shown where it finds none: no proof that there is none."""


def plan_remarks(
    plan: search.GridPlan, changes: list[search.RecipeChange], least: search.LeastRanks
) -> Iterator[str]:
    """Says all that the table does not, line by line."""
    if plan.job.assumed:
        yield f"assumed    {plan.job.assumed}"
    if plan.job.about.varied:
        yield "shapes     the volumes differ in shape; times and memory are those of the largest"
    yield from _doubts(plan)
    if plan.best is not None:
        yield from _about(plan, plan.best)
    else:
        yield nothing_fits_text(plan)
    fewest = least.found
    if fewest is not None:
        searched = "" if least.proven else "; grids of fewer ranks were not all traced"
        yield (
            f"least      {ranks_text(fewest.grid.size)}: {search.words_of(fewest.grid)}, "
            f"{bytes_text(fewest.memory.total)} a rank{searched}"
        )
    elif least.proven:
        yield "least      no number of ranks: parameters, gradients and optimizer are too large"
    else:
        yield f"least      {NONE_FOUND}"
    for change in changes:
        before, after = change.before, change.after
        yield (
            f"{change.override}: on {search.words_of(before.grid)} the step from "
            f"{step_text(before)} to {step_text(after)}, memory from "
            f"{bytes_text(before.memory.total)} to {bytes_text(after.memory.total)}"
            f"{'' if after.fits(plan.bounds.nbytes) else ', still too large'}"
        )
    yield from _others(plan)


def _doubts(plan: search.GridPlan) -> Iterator[str]:
    """Warns about numbers that the machine's file lacks."""
    machine = plan.machine
    if machine.note:
        yield f"machine    {machine.name}: {machine.note}"
    if other := other_processor(machine):
        yield f"machine    {other}; `hyperslab plan --calibrate FILE` measures the latter"
    farthest = machine.link(0, plan.ranks - 1)
    if plan.ranks > 1 and farthest not in machine.links:
        yield (
            f"machine    {machine.name} has no numbers of links of the class {farthest!r}, which "
            f"{plan.ranks} ranks need; those of another class stand in for them"
        )


def _about(plan: search.GridPlan, best: search.Candidate) -> Iterator[str]:
    per_node = plan.machine.ranks_per_node
    if plan.ranks > per_node:
        place = places(best.grid.model_dump(), per_node, plan.job.about.shape[1:])
        mates = np.flatnonzero(place < per_node).tolist()
        sent = best.cost.halo_bytes
        yield (
            f"nodes      {per_node} ranks each: {axes_in_nodes(best.grid.model_dump(), mates)}; "
            f"halos of the slowest rank {bytes_text(sent['node'])} a mini-batch inside, "
            f"{bytes_text(sent['network'])} across"
        )
    if best.cost.known:
        yield f"time       {_parts_text(best.seconds, 0.005, '-', time_text)}"
    else:
        yield (
            f"time       unknown: {best.cost.unknown:.0%} of the step, by its roofline, are "
            f"operators unlike any that {plan.machine.name} has measured; "
            "`hyperslab plan --calibrate FILE` measures them here"
        )
    yield f"memory     {_parts_text(best.memory, 0.01, ' ', bytes_text)}"
    if not plan.job.reads_each_step:
        yield from _input(plan, best)
    if best.cost.guessed >= 0.005:
        yield (
            f"measured   {1 - best.cost.guessed:.0%} of the operators' time; the rest is "
            f"interpolated or modelled: `hyperslab calibrate` measures more"
        )
    if best.cost.left_out:
        names = ", ".join(f"{name} ({count})" for name, count in best.cost.left_out.items())
        yield (
            f"left out   {names}: no meta form, so their costs are not known; about "
            f"{best.cost.left_out_share:.1%} of the step if they take as long as the others"
        )
    yield from (f"note       {note}" for note in best.notes)


def _parts_text(
    parts: Breakdown | RankMemory, least: float, space: str, text: Callable[[Any], str]
) -> str:
    """Lists the parts of at least so large a share."""
    return ", ".join(
        f"{name.replace('_', space)} {text(part)}"
        for name, part in parts.as_dict().items()
        if part >= least * parts.total
    )


def _input(plan: search.GridPlan, best: search.Candidate) -> Iterator[str]:
    """Gives BW_min = b S / t of Mathuriya et al. 2018, equation 1, and what reading takes here."""
    job = plan.job
    if job.recipe.data.synthetic is not None:
        return
    nbytes = job.read_bytes(best.grid)
    needed = nbytes / best.seconds.total
    took = f", which take {time_text(best.reading)} here" if best.reading else ""
    whose = "of whole samples on the busiest rank" if job.whole_each(best.grid) else "a rank"
    yield (
        f"input      {bytes_text(nbytes)} {whose} and step{took}; {needed / 1e6:.3g} MB/s "
        "hide it in the first epoch; later epochs read only what the store does not keep"
    )


def nothing_fits_text(plan: search.GridPlan, reason: str = "") -> str:
    """Says that no grid fits, and which one needs least."""
    smallest = plan.smallest
    assert smallest is not None
    grid = search.words_of(smallest.grid)
    return (
        f"no grid of {ranks_text(plan.ranks)} fits into {bytes_text(plan.bounds.nbytes)} a rank"
        f"{reason}; {grid} needs least, {bytes_text(smallest.memory.total)}"
    )


def _others(plan: search.GridPlan) -> Iterator[str]:
    hidden = len(plan.traced) - GRIDS_SHOWN
    if hidden > 0:
        yield f"and {hidden} more grids that were traced: --json lists them"
    if plan.untraced:
        grid = plan.untraced[0]
        seconds = time_text(plan.first.seconds(grid))
        yield (
            f"and {len(plan.untraced)} more grids that seem slower and were not traced (--all "
            f"traces them), the next {search.words_of(grid)}: roughly {seconds}"
        )
    kinds: dict[str, list[search.RefusedGrid]] = {}
    for one in plan.refused:
        kinds.setdefault(re.sub(r"\d+", "N", one.reason.splitlines()[0]), []).append(one)
    for alike in kinds.values():
        reason = alike[0].reason.splitlines()[0]
        others = f" (and {len(alike) - 1} more like it)" if len(alike) > 1 else ""
        yield f"illegal    {search.words_of(alike[0].grid)}: {reason}{others}"


def time_text(seconds: float) -> str:
    """Writes a time with its unit.

    >>> time_text(0.0123), time_text(2.5)
    ('12.3 ms', '2.5 s')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def ranks_text(count: int) -> str:
    """Writes a number of ranks.

    >>> ranks_text(1), ranks_text(8)
    ('1 rank', '8 ranks')
    """
    return f"{count} rank" if count == 1 else f"{count} ranks"


def bytes_text(nbytes: int) -> str:
    """Writes a size with its unit.

    >>> bytes_text(3 << 29), bytes_text(5 << 20), bytes_text(1 << 10)
    ('1.50 GiB', '5.00 MiB', '1.00 KiB')
    """
    power = min(3, (max(int(nbytes), 1).bit_length() - 1) // 10)
    return f"{nbytes / 1024**power:.{2 * min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


CAUSE_COLOURS = {
    "forward": "#2a5d9f",
    "backward_data": "#5b8fd1",
    "backward_filter": "#9dbfe8",
    "offload": "#8c6d46",
    "optimizer": "#7a6bb0",
    "overhead": "#b8b8b8",
    "halos": "#d9730d",
    "statistics": "#f0b067",
    "gradients": "#b3362b",
    "input": "#3d8f5f",
}
"""Colours the parts of a step: work in blues, communication in reds."""


def draw_plan(plan: search.GridPlan, path: Path) -> None:
    """Draws the first grids of the table as a PNG."""
    shown = plan.traced[:GRIDS_SHOWN]
    # A second of imports that training, which plans too, does without.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.6 + 0.36 * len(shown)), layout="constrained")
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    places = np.arange(len(shown))
    left = np.zeros(len(shown))
    for cause, color in CAUSE_COLOURS.items():
        part = 1e3 * np.array([one.seconds.as_dict()[cause] for one in shown])
        if part.sum() > 1e-3 * sum(one.seconds.total for one in shown):
            times.barh(places, part, left=left, color=color, label=cause.replace("_", " "))
        left += part
    needed = np.array([one.memory.total for one in shown]) / 2**30
    limit = plan.bounds.nbytes / 2**30
    colors = ["#5b8fd1" if one.fits(plan.bounds.nbytes) else "#b3362b" for one in shown]
    memory.barh(places, needed, color=colors)
    memory.axvline(limit, color="black", linestyle="--", linewidth=1, label="limit of memory")
    memory.set(xlabel="memory [GiB]")
    memory.tick_params(left=False)
    times.set(xlabel="step [ms]")
    times.set_yticks(places, [search.words_of(one.grid) for one in shown])
    times.invert_yaxis()
    for axes in (times, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{ranks_text(plan.ranks)} of {plan.machine.name}, "
        f"{plan.job.batch * plan.job.accumulated} samples a step"
    )
    figure.legend(loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=120)
