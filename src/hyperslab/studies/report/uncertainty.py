"""Writes how well predicted uncertainties are calibrated: coverage, and ranks of true values.

Bands hold 95 % of what calibrated predictions give, each place by itself. They count volumes and
not their parts; `hyperslab.train.uncertainty` says what ranks and levels are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hyperslab.studies.configurations import predictions_of_table
from hyperslab.studies.report.canvas import FIRST, INK, MUTED, SERIES, Canvas, Picture
from hyperslab.studies.report.html import Block, Figures, Heading
from hyperslab.studies.run_folder import Run
from hyperslab.studies.table import DASH, Table, TableCell, TableRow, label, number, slug
from hyperslab.train.uncertainty import LEVELS, RankStatistics, binomial_band, rank_statistics

DASHES = ("-", "--", "-.", ":")
JOINT = "all together"


def uncertainty_blocks(run: Run) -> list[Block]:
    """Tables and draws the calibration of an evaluation; nothing where it predicts no deviations.

    Raises:
        DataError: predictions with deviations do not say of which volumes they are.
    """
    names = tuple(run.errors)
    if not all(f"std_{name}" in run.predictions for name in names):
        return []
    path = run.path / "evaluation" / "predictions.csv"
    p = predictions_of_table(run.predictions, path, names, np.zeros(len(names)))
    each, joint = rank_statistics(p)
    volumes = len(set(p.volumes))
    rows = [_row(label(name), found.facts(volumes)) for name, found in each.items()]
    rows.append(_row(JOINT, joint.facts(volumes)))
    head = ["parameter", *(f"in {level} % intervals" for level in LEVELS)]
    head += ["mean squared residual", "probability of the ranks"]
    return [
        Heading("Predicted uncertainties"),
        f"Shares of {volumes} volumes, with 95 % intervals. Residuals are divided by the predicted "
        "standard deviation: a mean square above 1 is overconfident. The probability is that of "
        "ranks as far from uniform as these, or farther, if predictions are calibrated "
        "(Kolmogorov and Smirnov).",
        Table("Share of true values in predicted intervals", head, rows),
        Figures([_coverage({**each, JOINT: joint}, volumes)]),
        Heading("Ranks of the true values"),
        Figures([_ranks(name, found, volumes) for name, found in each.items()], "small"),
    ]


def _row(name: str, facts: Mapping[str, Any]) -> TableRow:
    cells = [
        TableCell(
            f"{number(100 * facts[f'coverage_{level}'])} %",
            below=f" {DASH} ".join(
                number(100 * end) for end in facts[f"coverage_{level}_interval"]
            ),
        )
        for level in LEVELS
    ]
    return [
        name,
        *cells,
        number(facts["mean_squared_residual"]),
        number(facts["ks_probability"]),
    ]


def _coverage(found: Mapping[str, RankStatistics], volumes: int) -> Picture:
    """Draws the share of true values inside intervals of each level, with the binomial band."""
    canvas = Canvas("coverage", height=380)
    level = np.linspace(0, 1, 101)
    canvas.axes.fill_between(level, *binomial_band(level, volumes), color=MUTED, alpha=0.25, lw=0)
    canvas.axes.plot(level, level, color=MUTED, linewidth=1)
    told = []
    for place, (name, one) in enumerate(found.items()):
        shares = one.coverage(level)
        style: dict[str, Any] = {"color": SERIES[place % len(SERIES)]}
        style["linestyle"] = DASHES[place % len(DASHES)]
        if name == JOINT:
            style = {"color": INK, "linestyle": "-"}
        canvas.axes.plot(level, shares, label=label(name), linewidth=1.5, **style)
        told.append(f"{name} {number(100 * float(shares[68]))} %")
    canvas.axes.set(
        xlim=(0, 1),
        ylim=(0, 1),
        xlabel="level of the interval",
        ylabel="share of true values inside",
    )
    canvas.legend()
    return canvas.picture(
        title="Coverage of predicted intervals",
        alt=f"Share of true values in predicted intervals; in those of 68 %: {', '.join(told)}.",
        caption="Below the diagonal: overconfident. Grey: 95 % of what calibrated predictions of "
        f"{volumes} volumes give at one level.",
    )


def _ranks(name: str, found: RankStatistics, volumes: int) -> Picture:
    """Draws the distribution of the ranks, with the binomial band of the uniform one."""
    canvas = Canvas(f"ranks-{slug(name)}", width=240, height=190)
    bins = int(np.clip(volumes // 8, 4, 20))
    band = binomial_band(np.array(1 / bins), volumes)
    lower, upper = (float(end) * len(found.ranks) for end in band)
    canvas.axes.axhspan(lower, upper, color=MUTED, alpha=0.25, linewidth=0)
    canvas.axes.axhline(len(found.ranks) / bins, color=INK, linewidth=1)
    counts, edges = np.histogram(found.ranks, bins, (0, 1))
    canvas.axes.stairs(counts, edges, fill=True, color=FIRST, alpha=0.75)
    canvas.axes.set(xlim=(0, 1), xlabel="rank of the true value", ylabel="samples")
    canvas.axes.grid(visible=False, axis="x")
    canvas.whole_ticks("y")
    outside = int(np.sum((counts < lower) | (counts > upper)))
    return canvas.picture(
        title=label(name),
        alt=f"{name}: histogram of {len(found.ranks)} ranks in {bins} bins, {outside} of them "
        "outside the band of calibrated predictions.",
        caption=f"{outside} of {bins} bins outside the band. A hill is underconfident, a valley "
        "overconfident, a slope biased.",
    )
