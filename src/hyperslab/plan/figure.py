"""A plan as a figure: the time of each grid by cause, its memory beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hyperslab.plan.grids import words_of
from hyperslab.plan.search import GridPlan
from hyperslab.plan.show import GRIDS_SHOWN, ranks_text

CAUSES = {
    "forward": "#2a5d9f",
    "backward_data": "#5b8fd1",
    "backward_filter": "#9dbfe8",
    "optimizer": "#7a6bb0",
    "overhead": "#b8b8b8",
    "halos": "#d9730d",
    "statistics": "#f0b067",
    "gradients": "#b3362b",
    "input": "#3d8f5f",
}
"""The parts of a step and their colours: work in blues, communication in reds."""


def draw_plan(plan: GridPlan, path: Path) -> None:
    """Write a PNG of the first grids of the table."""
    shown = plan.traced[:GRIDS_SHOWN]
    figure = Figure(figsize=(10, 1.6 + 0.36 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    places = np.arange(len(shown))
    left = np.zeros(len(shown))
    for cause, color in CAUSES.items():
        part = 1e3 * np.array([one.seconds.as_dict()[cause] for one in shown])
        if part.sum() > 1e-3 * sum(one.seconds.total for one in shown):
            times.barh(places, part, left=left, color=color, label=cause.replace("_", " "))
        left += part
    needed = np.array([one.memory.total for one in shown]) / 2**30
    limit = plan.limit.nbytes / 2**30
    colors = ["#5b8fd1" if one.fits(plan.limit.nbytes) else "#b3362b" for one in shown]
    memory.barh(places, needed, color=colors)
    memory.axvline(limit, color="black", linestyle="--", linewidth=1, label="limit of memory")
    memory.set(xlabel="memory [GiB]")
    memory.tick_params(left=False)
    times.set(xlabel="step [ms]")
    times.set_yticks(places, [words_of(one.grid) for one in shown])
    times.invert_yaxis()
    for axes in (times, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{ranks_text(plan.ranks)} of {plan.machine.name}, "
        f"{plan.job.batch * plan.job.accumulated} samples a step"
    )
    figure.legend(loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=120)
