"""Figure 9 of Oyama et al. 2020: the test loss by epoch and by time, with the controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hyperslab.metrics.of_volumes import means_of_volumes
from hyperslab.metrics.regression import FloatArray
from hyperslab.report.comparison.configurations import Comparison, Configuration
from hyperslab.report.comparison.scored import Scored
from hyperslab.report.figures.learning import MEASURES, whole_numbers
from hyperslab.report.figures.svg import INK, MUTED, SERIES, Canvas, Picture
from hyperslab.report.number_format import number

DASHES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (2, 1)))
"""Of the configurations: figures are to be read without colours, too."""

POWERS = {"mse": 2, "l1": 1}
"""Of the differences whose mean a loss is: such a loss others have, too, that only predict."""

HOUR = 3600.0
MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Curve:
    """The losses of a configuration by epoch (S, E), and the end of each epoch (S, E) [s]."""

    losses: FloatArray
    seconds: FloatArray
    followed: bool  # the test split's; else the validation's


def curve_of(configuration: Configuration) -> Curve | None:
    """As far as all seeds are, the running minimum where the network sees parts of volumes.

    None where a seed has no epoch done yet.
    The loss of one epoch says little there: the paper shows the minimum at each point in time.
    """
    tables = [run.epochs for run in configuration.runs]
    followed = all("test_loss" in table for table in tables)
    key = "test_loss" if followed else "validation_loss"
    epochs = min(len(table.get(key, ())) for table in tables)
    if epochs == 0:
        return None
    losses = np.stack([table[key][:epochs] for table in tables])
    seconds = np.stack([np.cumsum(table["seconds"][:epochs]) for table in tables])
    if configuration.of_parts:
        losses = np.fmin.accumulate(losses, axis=1)
    return Curve(losses, seconds, followed)


def loss_in_common(comparison: Comparison) -> str | None:
    """The name of the loss that all runs have been trained on, if it is one."""
    runs = [run for one in comparison.configurations for run in one.runs]
    names = {run.setting("loss") if isinstance(run.setting("loss"), str) else None for run in runs}
    return names.pop() if len(names) == 1 else None


def loss_curves(comparison: Comparison) -> list[Picture]:
    """By epoch and by time: medians over seeds, from the least to the largest as a band.

    Levels are of what only predicts, where the loss is a mean of (squared) differences.
    """
    found = {one.name: curve_of(one) for one in comparison.configurations}
    curves = {name: curve for name, curve in found.items() if curve is not None}
    if not curves:
        return []
    longest = max(float(np.median(curve.seconds, 0)[-1]) for curve in curves.values())
    unit, word = (1.0, "s") if longest < 2 * MINUTE else (MINUTE, "min")
    if longest > 2 * HOUR:
        unit, word = HOUR, "h"
    followed = all(curve.followed for curve in curves.values())
    return [
        _figure(comparison, curves, "epoch", None, "epoch", followed),
        _figure(comparison, curves, "time", unit, f"training time [{word}]", followed),
    ]


def _figure(
    comparison: Comparison,
    curves: Mapping[str, Curve],
    key: str,
    unit: float | None,
    axis: str,
    followed: bool,
) -> Picture:
    canvas = Canvas(f"figure-9-{key}", width=520, height=420)
    loss = loss_in_common(comparison)
    power = POWERS.get(loss or "")
    for place, one in enumerate(comparison.configurations):
        if one.name not in curves:
            continue
        _draw_curve(canvas, curves[one.name], unit, one.name, place)
        if one.averaged is not None and power is not None:
            canvas.axes.axhline(
                _level(one.averaged, power),
                color=SERIES[place % len(SERIES)],
                linewidth=1.2,
                linestyle=":",
            )
    of_mean = _draw_controls(canvas, comparison, power) if power is not None else ""
    if all(np.nanmin(curve.losses, initial=np.inf) > 0 for curve in curves.values()):
        canvas.log()
    if unit is None:
        whole_numbers(canvas)
    what = "test loss" if followed else "validation loss"
    measure = f": {MEASURES[loss]}" if loss in MEASURES else ""
    canvas.axes.set(xlabel=axis, ylabel=f"{what}{measure}")
    canvas.legend()
    at_the_end = "; ".join(
        f"{name} {number(float(np.median(curve.losses, 0)[-1]))}" for name, curve in curves.items()
    )
    missing = [one.name for one in comparison.configurations if one.name not in curves]
    without = f" Without {', '.join(missing)}: no epoch is done." if missing else ""
    split = "" if followed else "The runs did not follow the test loss (follow_test): validation. "
    parts = any(one.of_parts for one in comparison.configurations)
    return canvas.picture(
        title=f"{'Test' if followed else 'Validation'} loss by {key}",
        alt=f"Loss by {key}; at the end: {at_the_end}{of_mean}.",
        caption=f"{split}Median over seeds, with the range as a band"
        + ("; for sub-volumes the running minimum" if parts else "")
        + ". Dotted: sub-volumes' predictions averaged over a universe and recalibrated."
        * any(one.averaged is not None and power for one in comparison.configurations)
        + without,
    )


def _draw_curve(canvas: Canvas, curve: Curve, unit: float | None, name: str, place: int) -> None:
    """The ``place``-th curve, over epochs or over time in ``unit`` [s], with its band."""
    colour = SERIES[place % len(SERIES)]
    epochs = np.arange(curve.losses.shape[1]) + 1.0
    x = epochs if unit is None else np.median(curve.seconds, 0) / unit
    canvas.axes.plot(
        x,
        np.median(curve.losses, 0),
        label=name,
        color=colour,
        linestyle=DASHES[place % len(DASHES)],
        marker="o" if len(x) < 20 else "",
        markersize=3,
    )
    if len(curve.losses) > 1:
        ends = (curve.losses.min(0), curve.losses.max(0))
        canvas.axes.fill_between(x, *ends, color=colour, alpha=0.15, linewidth=0)


def _draw_controls(canvas: Canvas, comparison: Comparison, power: int) -> str:
    """As level lines; what to say of the first, predicting the mean."""
    squared = comparison.configurations[0].scored.of_mean
    of_mean = float((squared ** (power / 2)).mean())
    canvas.axes.axhline(of_mean, color=MUTED, linewidth=1.5, label="predicting the mean")
    for place, control in enumerate(comparison.controls):
        canvas.axes.axhline(
            _level(control, power), color=INK, linewidth=1.5, linestyle=DASHES[1 + place % 5],
            label=control.name,
        )  # fmt: skip
    return f"; predicting the mean {number(of_mean)}"


def _level(scored: Scored, power: int) -> float:
    """The median over seeds of the mean of the differences to that power, over all parameters."""
    of_seeds = [
        means_of_volumes(np.abs(seed.predicted - seed.true) ** power, seed.volumes).mean()
        for seed in scored.seeds
    ]
    return float(np.median(of_seeds))
