"""Figure 10 of Oyama et al. 2020: true against predicted, and the residuals, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hyperslab.errors import printable
from hyperslab.report.comparison.configurations import LONGEST_NAME, Comparison
from hyperslab.report.comparison.scored import Scored
from hyperslab.report.figures.svg import FIRST, INK, MUTED, SECOND, Canvas, Picture, cut_short
from hyperslab.report.number_format import MINUS, label, number

POINTS = 200
"""Drawn of each scatter plot, as in the paper."""

SCATTER_REACH = 1.4
"""Ends of its axes, either side of zero."""


def scatters(comparison: Comparison, parameter: str) -> list[Picture]:
    """One picture for each configuration, average and control: that of the median seed."""
    at = comparison.parameters.index(parameter)
    return [_scatter(row, at, place) for place, row in enumerate(comparison.rows)]


def _scatter(row: Scored, at: int, place: int) -> Picture:
    canvas = Canvas(f"figure-10-{at}-{place}", width=220, height=230)
    seed = row.typical
    true = seed.true[:, at]
    predicted = seed.predicted[:, at]
    chosen = np.random.default_rng(0).permutation(len(true))[:POINTS]
    axes = canvas.axes
    axes.plot(
        [-SCATTER_REACH, SCATTER_REACH],
        [-SCATTER_REACH, SCATTER_REACH],
        color=MUTED,
        linewidth=1,
        linestyle="--",
    )
    axes.plot(true[chosen], predicted[chosen], "o", color=FIRST, alpha=0.6, markersize=4, mew=0)
    axes.set(
        xlim=(-SCATTER_REACH, SCATTER_REACH),
        ylim=(-SCATTER_REACH, SCATTER_REACH),
        xlabel="true",
        ylabel="predicted",
    )
    axes.set_aspect("equal")
    axes.locator_params(nbins=5)
    ratio = number(float(np.median(row.ratios(row.parameters[at]))))
    outside = int(np.sum(np.abs(predicted[chosen]) > SCATTER_REACH))
    some = f" Outside: {outside}." if outside else ""
    few = f" {len(chosen)} of {len(true)} samples." if len(chosen) < len(true) else ""
    return canvas.picture(
        title=row.name,
        alt=f"{row.name}: predicted against true {row.parameters[at]}, error {ratio} of that of "
        "predicting the mean.",
        caption=f"{ratio} of predicting the mean.{few}{some}",
    )


def residual_distributions(comparison: Comparison) -> list[Picture]:
    """One picture for each parameter, all configurations and controls in it."""
    return [_residuals(comparison.rows, at) for at in range(len(comparison.parameters))]


def _residuals(rows: Sequence[Scored], at: int) -> Picture:
    name = rows[0].parameters[at]
    canvas = Canvas(f"figure-10-residuals-{at}", width=520, height=70 + 30 * (len(rows) + 1))
    whole = rows[0].typical
    off = {row.name: (row.typical.predicted - row.typical.true)[:, at] for row in rows}
    off["predicting the mean"] = whole.true[:, at].mean() - whole.true[:, at]
    axes = canvas.axes
    axes.boxplot(
        list(off.values()),
        orientation="horizontal",
        tick_labels=[cut_short(printable(name), LONGEST_NAME) for name in off],
        whis=(2.5, 97.5),
        widths=0.6,
        flierprops={"marker": ".", "markersize": 3, "markeredgecolor": MUTED},
        boxprops={"color": FIRST, "linewidth": 1.5},
        whiskerprops={"color": FIRST},
        capprops={"color": FIRST},
        medianprops={"color": SECOND, "linewidth": 2},
    )
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set(xlabel=f"predicted {MINUS} true")
    widths = "; ".join(
        f"{row}: {number(float(np.sqrt(np.mean(values**2))))}" for row, values in off.items()
    )
    return canvas.picture(
        title=label(name),
        alt=f"Distributions of the residuals of {name}; root mean squares: {widths}.",
        caption=f"Median, quartiles, 95 % of the samples, and those beyond. Root mean squares: "
        f"{widths}.",
    )
