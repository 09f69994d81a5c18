"""The figures that show what a run learnt: losses, predictions, residuals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hyperslab.metrics.regression import FloatArray
from hyperslab.report.figures.svg import FIRST, INK, MUTED, SECOND, Canvas, Picture
from hyperslab.report.number_format import MINUS, counted, label, number
from hyperslab.report.run_folder import Table

MEASURES = {
    "mse": "mean squared error",
    "l1": "mean absolute error",
    "cross_entropy": "cross-entropy",
    "dice": "Dice loss",
    "generalised_dice": "generalised Dice loss",
    "focal": "focal loss",
    "dice_cross_entropy": "Dice loss + cross-entropy",
}
"""What a recipe's loss is."""

DRAWN = 1000
"""More points than this only make a page heavy: an even choice of them is drawn."""


def loss_by_epoch(epochs: Table, *, measure: str, of_mean: float | None) -> Picture:
    """Training and validation loss by epoch (Oyama et al. 2020, figure 9).

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
    whole_numbers(canvas)
    axes.set(xlabel="epoch", ylabel=measure)
    canvas.legend()
    best, at = _best(epochs)
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


def loss_by_step(steps: Table, *, measure: str) -> Picture:
    """The loss of every mini-batch, and its running median."""
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
    whole_numbers(canvas)
    canvas.axes.set(xlabel="step", ylabel=measure)
    canvas.legend()
    return canvas.picture(
        title="Loss by step",
        alt=f"Loss of {len(step)} training steps, from {number(loss[0])} to {number(loss[-1])}.",
        caption="The loss of each mini-batch, as it was trained.",
    )


def residuals(
    name: str, predictions: Table, errors: dict[str, float | None], *, reach: float
) -> Picture:
    """Distribution of predicted - true, normalised (figure 10, bottom).

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
    whole_numbers(canvas, axis="y")
    bias = number(errors.get("bias"))
    rmse = number(errors.get("rmse"))
    return canvas.picture(
        title=label(name),
        alt=f"{name}: histogram of {len(off)} residuals, bias {bias}, "
        f"root mean square error {rmse}.",
        caption=f"Bias {bias} (dashed), RMSE {rmse}.",
    )


def reach_of(names: Iterable[str], predictions: Table) -> float:
    """A limit that holds the residuals of all parameters either side of zero."""
    return reach_around(*(off_by(name, predictions) for name in names))


def off_by(name: str, predictions: Table) -> FloatArray:
    """The residuals of one parameter, normalised."""
    return predictions[f"predicted_{name}"] - predictions[f"true_{name}"]


def evenly(count: int) -> NDArray[np.int64]:
    """Indices of at most DRAWN items, evenly spaced, first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, DRAWN)).round().astype(np.int64))


def running_median(values: FloatArray) -> FloatArray:
    """The median of the values around each one; the window is a twentieth of all, at least 5.

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
    """A limit that holds all values either side of zero."""
    reach = max(float(np.nanmax(np.abs(v), initial=0.0)) for v in values)
    return 1.08 * reach if reach > 0 else 1.0


def log_if_wide(canvas: Canvas, *values: FloatArray) -> None:
    """A logarithmic vertical axis, where the values are positive and spread by more than 4."""
    every = np.concatenate(values)
    every = every[np.isfinite(every)]
    if len(every) and every.min() > 0 and every.max() > 4 * every.min():
        canvas.log()


def whole_numbers(canvas: Canvas, axis: Literal["x", "y"] = "x") -> None:
    canvas.axes.locator_params(axis=axis, integer=True, nbins=6, min_n_ticks=1)


def _best(epochs: Table) -> tuple[str, str]:
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
