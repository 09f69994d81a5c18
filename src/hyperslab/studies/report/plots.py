"""Draws the figures of a training: losses, Dice, predictions, residuals, throughput, memory.

The helpers that thin, smooth and scale curves are here, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hyperslab.studies.number_format import (
    MINUS,
    counted,
    interval_words,
    label,
    number,
    scale_of,
    size,
)
from hyperslab.studies.report.canvas import FIRST, INK, MUTED, SECOND, THIRD, Canvas, Picture
from hyperslab.studies.run_folder import Columns, Run
from hyperslab.train.metrics import ConfidenceInterval, FloatArray

LOSS_NAMES = {
    "mse": "mean squared error",
    "l1": "mean absolute error",
    "cross_entropy": "cross-entropy",
    "dice": "Dice loss",
    "generalised_dice": "generalised Dice loss",
    "focal": "focal loss",
    "dice_cross_entropy": "Dice loss + cross-entropy",
}
"""Names the losses of a recipe in words."""

MOST_POINTS = 1000
"""Limits the points that are drawn, an even choice: more only make a page heavy."""


def loss_by_epoch(epochs: Columns, *, measure: str, of_mean: float | None) -> Picture:
    """Draws training and validation loss by epoch (Oyama et al. 2020, figure 9).

    ``measure`` says what the loss is; ``of_mean`` is that of predicting the training mean, if
    an evaluation measured it.
    """
    canvas = Canvas("loss-epoch")
    axes = canvas.axes
    epoch = epochs["epoch"] + 1
    marker = "o" if len(epoch) < 20 else ""
    for name, color, style in (("train", FIRST, "-"), ("validation", SECOND, "--")):
        values = epochs[f"{name}_loss"]
        if not np.isfinite(values).any():
            continue
        axes.plot(epoch, values, style, color=color, label=name, marker=marker, markersize=4)
    if of_mean is not None:
        axes.axhline(
            of_mean, color=MUTED, linewidth=1.5, linestyle=":", label="predicting the mean"
        )
    log_if_wide(canvas, epochs["train_loss"], epochs["validation_loss"])
    whole_number_ticks(canvas)
    axes.set(xlabel="epoch", ylabel=measure)
    canvas.legend()
    best, at = _mark_best(epochs)
    return canvas.picture(
        title="Loss by epoch",
        alt=f"Training and validation loss over {counted(len(epoch), 'epoch')}; "
        f"the training loss ends at {number(epochs['train_loss'][-1])}, {best}.",
        caption=f"{measure[:1].upper()}{measure[1:]}; {best}{at}."
        + (
            " Dotted: always predicting the training mean (test split)."
            if of_mean is not None
            else ""
        ),
    )


def loss_by_step(steps: Columns, *, measure: str) -> Picture:
    """Draws the loss of every mini-batch, and its running median."""
    canvas = Canvas("loss-step")
    step = steps["step"]
    loss = steps["loss"]
    chosen = evenly(len(step))
    marker = "o" if len(step) < 20 else ""  # a single step has no line
    canvas.axes.plot(
        step[chosen], loss[chosen], color=FIRST, alpha=0.55, linewidth=1, label="step",
        marker=marker, markersize=4,
    )  # fmt: skip
    if len(step) >= 10:
        smooth = running_median(loss)
        canvas.axes.plot(
            step[chosen], smooth[chosen], color=SECOND, linewidth=2, label="running median"
        )
    log_if_wide(canvas, loss)
    whole_number_ticks(canvas)
    canvas.axes.set(xlabel="step", ylabel=measure)
    canvas.legend()
    return canvas.picture(
        title="Loss by step",
        alt=f"Loss of {len(step)} training steps, from {number(loss[0])} to {number(loss[-1])}.",
        caption="The loss of each mini-batch, as it was trained.",
    )


def residuals(
    name: str, predictions: Columns, errors: dict[str, float | None], *, reach: float
) -> Picture:
    """Draws the distribution of predicted - true, normalised (figure 10, bottom).

    ``reach`` ends the horizontal axis on both sides: one for all parameters, so that a narrow
    distribution looks narrow.
    """
    canvas = Canvas(f"residual-{slug(name)}", width=240, height=190)
    off = off_by(name, predictions)
    bins = np.linspace(-reach, reach, 2 * int(np.clip(1.5 * np.sqrt(len(off)), 7, 30)) + 2)
    canvas.axes.hist(off, bins=list(bins), color=FIRST, alpha=0.75)
    canvas.axes.axvline(0, color=INK, linewidth=1)
    canvas.axes.axvline(float(off.mean()), color=SECOND, linewidth=2, linestyle="--")
    canvas.axes.set(xlim=(-reach, reach), xlabel=f"predicted {MINUS} true", ylabel="samples")
    canvas.axes.grid(visible=False, axis="x")
    canvas.axes.locator_params(axis="x", nbins=5)
    whole_number_ticks(canvas, axis="y")
    bias = number(errors.get("bias"))
    rmse = number(errors.get("rmse"))
    return canvas.picture(
        title=label(name),
        alt=f"{name}: histogram of {len(off)} residuals, bias {bias}, "
        f"root mean square error {rmse}.",
        caption=f"Bias {bias} (dashed), RMSE {rmse}.",
    )


def reach_of(names: Iterable[str], predictions: Columns) -> float:
    """Finds a limit that holds the residuals of all parameters either side of zero."""
    return reach_around(*(off_by(name, predictions) for name in names))


def off_by(name: str, predictions: Columns) -> FloatArray:
    """Returns the residuals of one parameter, normalised."""
    return predictions[f"predicted_{name}"] - predictions[f"true_{name}"]


def evenly(count: int) -> NDArray[np.int64]:
    """Chooses at most `MOST_POINTS` indices, evenly spaced, first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(np.int64))


def running_median(values: FloatArray) -> FloatArray:
    """Computes the median around each value; the window is a twentieth of all, at least 5.

    NaN where there is no value around.
    """
    half = max(2, len(values) // 40)
    padded = np.pad(values, half, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    medians = np.full(len(values), np.nan)
    known = np.isfinite(windows).any(axis=1)
    medians[known] = np.nanmedian(windows[known], axis=1)
    return medians


def reach_around(*values: FloatArray) -> float:
    """Finds a limit that holds all values either side of zero."""
    reach = max(float(np.nanmax(np.abs(v), initial=0.0)) for v in values)
    return 1.08 * reach if reach > 0 else 1.0


def log_if_wide(canvas: Canvas, *values: FloatArray) -> None:
    """Makes the axis logarithmic where values are positive and spread by more than 4."""
    every = np.concatenate(values)
    every = every[np.isfinite(every)]
    if len(every) and every.min() > 0 and every.max() > 4 * every.min():
        canvas.log()


def whole_number_ticks(canvas: Canvas, axis: Literal["x", "y"] = "x") -> None:
    canvas.axes.locator_params(axis=axis, integer=True, nbins=6, min_n_ticks=1)


def _mark_best(epochs: Columns) -> tuple[str, str]:
    loss = epochs["validation_loss"]
    if not np.isfinite(loss).any():
        return "no validation loss", ""
    best = int(np.nanargmin(loss))
    return (
        f"best validation loss {number(loss[best])}",
        f" in epoch {epochs['epoch'][best] + 1:.0f}",
    )


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


FEWEST_VOLUMES = 5
"""Asks for so many volumes: with fewer a bootstrap says nothing."""

DRAWN_LINES = 1000
"""Counts the straight lines through samples that a bootstrap draws."""


def scatter_plot(
    name: str,
    predictions: Columns,
    errors: dict[str, float | None],
    ratio: ConfidenceInterval | None,
) -> Picture:
    """Draws true against predicted, normalised, with the line y = x (figure 10, top).

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
    """Computes places along the true values, and the ends of the line's interval there.

    By a bootstrap over samples; None where there are too few, or all are alike.
    """
    known = np.isfinite(true) & np.isfinite(predicted)
    x = true[known]
    y = predicted[known]
    if len(x) < FEWEST_VOLUMES or np.ptp(x) == 0:
        return None
    drawn = np.random.default_rng(0).integers(0, len(x), (DRAWN_LINES, len(x)))
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


DICE_COLUMN = "validation_dice_"
"""Precedes a class's name in the history's columns."""


def dice_by_epoch(run: Run) -> list[Picture]:
    """Draws Dice of the validation split by epoch, a line for each class but the background."""
    names = [name.removeprefix(DICE_COLUMN) for name in run.epochs if name.startswith(DICE_COLUMN)][
        1:
    ]
    if not names:
        return []
    canvas = Canvas("dice-epoch")
    epoch = run.epochs["epoch"] + 1
    marker = "o" if len(epoch) < 20 else ""
    for i, name in enumerate(names):
        canvas.axes.plot(
            epoch,
            run.epochs[DICE_COLUMN + name],
            ("-", "--", ":", "-.")[i % 4],
            color=(FIRST, SECOND, THIRD)[i % 3],
            label=name,
            marker=marker,
            markersize=4,
        )
    canvas.axes.set(xlabel="epoch", ylabel="Dice", ylim=(-0.02, 1.02))
    canvas.axes.locator_params(axis="x", integer=True, nbins=6)
    canvas.legend()
    ends = ", ".join(f"{name} {number(run.epochs[DICE_COLUMN + name][-1])}" for name in names)
    return [
        canvas.picture(
            title="Dice by epoch",
            alt=f"Dice of the validation split over {len(epoch)} epochs, in the end: {ends}.",
            caption=f"All voxels of the validation split together; in the end: {ends}.",
        )
    ]


FLOP_UNITS = ((1e15, "Pflop"), (1e12, "Tflop"), (1e9, "Gflop"), (1e6, "Mflop"), (1.0, "flop"))


def throughput_by_step(steps: Columns) -> Picture:
    """Draws samples per second of each step, over all ranks together."""
    rate = steps["samples_per_second"]
    median = float(np.nanmedian(rate))
    canvas = _over_steps("throughput", steps["step"], rate, color=FIRST)
    canvas.axes.axhline(median, color=MUTED, linewidth=1, linestyle="--")
    canvas.axes.set(ylabel="samples / s")
    pace = float(np.nanmedian(steps["step_seconds"]))
    return canvas.picture(
        title="Throughput",
        alt=f"Samples per second over {len(rate)} steps; the median is {number(median)}.",
        caption=f"All ranks together; median {number(median)} samples/s (dashed), "
        f"{number(pace)} s a step.",
    )


def flops_by_step(steps: Columns) -> Picture:
    """Draws floating-point operations per second of each step, over all ranks together."""
    rate = steps["flops_per_second"]
    median = float(np.nanmedian(rate))
    scale, unit = next((s, u) for s, u in FLOP_UNITS if median >= s or s == 1)
    canvas = _over_steps("flops", steps["step"], rate / scale, color=THIRD)
    canvas.axes.set(ylabel=f"{unit}/s")
    shares = steps.get("peak_share", np.array([]))
    known = np.isfinite(shares).any()
    of_peak = f", {number(100 * float(np.nanmedian(shares)))} % of the peak" if known else ""
    words = f"median {number(median / scale)} {unit}/s{of_peak}"
    return canvas.picture(
        title="Arithmetic",
        alt=f"Floating-point operations per second over {len(rate)} steps; {words}.",
        caption=f"Convolutions and products of matrices, all ranks together; {words}.",
    )


def memory_by_step(steps: Columns) -> Picture:
    """Draws the most memory that any rank has held, up to each step."""
    used = steps["memory_bytes"]
    peak = float(np.nanmax(used))
    scale, unit = scale_of(peak)
    canvas = _over_steps("memory", steps["step"], used / scale, color=THIRD)
    canvas.axes.set(ylabel=f"memory [{unit}]")
    return canvas.picture(
        title="Memory",
        alt=f"Highest memory of all ranks over {len(used)} steps; the peak is {size(peak)}.",
        caption=f"The most that any rank has held up to then; {size(peak)} in the end.",
    )


def waiting_by_step(steps: Columns) -> Picture:
    """Draws the share of each step that the slowest rank spent waiting for data."""
    share = 100 * steps["wait_seconds"] / np.maximum(steps["step_seconds"], 1e-9)
    canvas = _over_steps("waiting", steps["step"], share, color=SECOND)
    canvas.axes.set(ylabel="waiting for data [%]")
    overall = number(100 * waiting_share(steps))
    return canvas.picture(
        title="Waiting for data",
        alt=f"Share of each of {len(share)} steps spent waiting for data; {overall} % overall.",
        caption=f"Share of the step that the slowest rank had no data; {overall} % overall.",
    )


def waiting_share(steps: Columns) -> float:
    """Computes the time spent waiting for data over that of all steps."""
    return float(np.nansum(steps["wait_seconds"]) / max(np.nansum(steps["step_seconds"]), 1e-9))


def _over_steps(
    name: str, step: NDArray[np.float64], values: NDArray[np.float64], *, color: str
) -> Canvas:
    """Draws every step faintly and the running median on top, from zero up."""
    canvas = Canvas(name, width=360, height=230)
    chosen = evenly(len(step))
    few = len(step) < 20
    canvas.axes.plot(
        step[chosen],
        values[chosen],
        color=color,
        alpha=1.0 if few else 0.5,
        linewidth=1,
        marker="o" if few else "",
        markersize=4,
    )
    smooth = running_median(values)
    if not few:
        canvas.axes.plot(step[chosen], smooth[chosen], color=color, linewidth=2)
    # A slow first step must not flatten all the others.
    top = max(float(np.nanmax(smooth)), float(np.nanpercentile(values, 98)))
    canvas.axes.set(xlabel="step", ylim=(0, 1.15 * top if top > 0 else 1))
    whole_number_ticks(canvas)
    return canvas
