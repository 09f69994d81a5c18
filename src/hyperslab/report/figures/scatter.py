"""The figure of true against predicted numbers, with what few samples leave open."""

from __future__ import annotations

import numpy as np

from hyperslab.metrics.bootstrap import ConfidenceInterval
from hyperslab.metrics.regression import FloatArray
from hyperslab.report.figures.learning import evenly, reach_around, slug
from hyperslab.report.figures.svg import FIRST, INK, MUTED, Canvas, Picture
from hyperslab.report.number_format import interval_words, label, number
from hyperslab.report.run_folder import Table

FEWEST = 5
"""With fewer samples a bootstrap says nothing."""

LINES = 1000
"""Straight lines through samples that are drawn anew."""


def scatter_plot(
    name: str,
    predictions: Table,
    errors: dict[str, float | None],
    ratio: ConfidenceInterval | None,
) -> Picture:
    """True against predicted, normalised, with the line y = x (figure 10, top).

    The band is where 95 % of the straight lines through the samples lie that a bootstrap draws:
    flat for a network that predicts the mean. ``ratio``: of the errors to those of the mean.
    """
    canvas = Canvas(f"scatter-{slug(name)}", width=240, height=250)
    true = predictions[f"true_{name}"]
    predicted = predictions[f"predicted_{name}"]
    chosen = evenly(len(true))
    reach = max(1.1, reach_around(true, predicted))
    axes = canvas.axes
    axes.plot([-reach, reach], [-reach, reach], color=MUTED, linewidth=1, linestyle="--")
    band = fitted_band(true, predicted)
    if band is not None:
        axes.fill_between(*band, color=FIRST, alpha=0.18, linewidth=0)
    axes.plot(true[chosen], predicted[chosen], "o", color=FIRST, alpha=0.65, markersize=5, mew=0)
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), xlabel="true", ylabel="predicted")
    axes.set_aspect("equal")
    axes.set_title(f"{len(true)} samples", loc="left", fontsize=12, color=INK)
    axes.locator_params(nbins=5)
    some = "" if len(chosen) == len(true) else f" {len(chosen)} of {len(true)} samples are drawn."
    shaded = "" if band is None else " Band: the straight line through them, 95 %."
    r2 = number(errors.get("r2"))
    correlation = number(errors.get("correlation"))
    of_mean = "" if ratio is None else f"Ratio {interval_words(ratio)}; "
    return canvas.picture(
        title=label(name),
        alt=f"{name}: predicted against true for {len(true)} test samples, R squared {r2}, "
        f"correlation {correlation}.",
        caption=f"{of_mean}R² = {r2}, correlation {correlation}.{shaded}{some}",
    )


def fitted_band(
    true: FloatArray, predicted: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray] | None:
    """Places along the true values, and the lower and upper end of the line's interval there.

    By a bootstrap over samples; None where there are too few, or all are alike.
    """
    known = np.isfinite(true) & np.isfinite(predicted)
    x = true[known]
    y = predicted[known]
    if len(x) < FEWEST or np.ptp(x) == 0:
        return None
    drawn = np.random.default_rng(0).integers(0, len(x), (LINES, len(x)))
    x_drawn = x[drawn]
    y_drawn = y[drawn]
    x_mean = x_drawn.mean(1)
    y_mean = y_drawn.mean(1)
    off = x_drawn - x_mean[:, None]
    spread = (off**2).sum(1)
    usable = spread > 0
    slope = (off * (y_drawn - y_mean[:, None])).sum(1)[usable] / spread[usable]
    places = np.linspace(x.min(), x.max(), 40)
    lines = y_mean[usable, None] + slope[:, None] * (places - x_mean[usable, None])
    lower, upper = np.quantile(lines, [0.025, 0.975], axis=0)
    return places, lower, upper
