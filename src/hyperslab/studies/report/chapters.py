"""Writes the chapters of a run's page on learning, speed and provenance, and its key numbers.

Each chapter is a function that takes the run; where something is missing the chapter says which
command makes it. Those on accuracy, on volumes and on timelines have modules of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from shlex import quote
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from hyperslab.errors import DataError
from hyperslab.studies.report import html
from hyperslab.studies.report.accuracy import dice_of, evenly, learnt_parameters, ratios_of
from hyperslab.studies.report.canvas import (
    FEW_POINTS,
    FIRST,
    MUTED,
    SECOND,
    SERIES,
    THIRD,
    Canvas,
    Picture,
)
from hyperslab.studies.run_folder import Columns, Run
from hyperslab.studies.table import (
    DASH,
    Table,
    TableRow,
    counted,
    duration,
    label,
    number,
    scale_of,
    size,
    times,
)
from hyperslab.train.history import CHANGES
from hyperslab.train.metrics import FloatArray
from hyperslab.util.documents import read_json_lines

LOSS_NAMES = {
    "mse": "mean squared error",
    "l1": "mean absolute error",
    "gaussian": "negative log likelihood",
    "cross_entropy": "cross-entropy",
    "dice": "Dice loss",
    "generalised_dice": "generalised Dice loss",
    "focal": "focal loss",
    "dice_cross_entropy": "Dice loss + cross-entropy",
}
"""Names the losses of a recipe in words."""

DICE_COLUMN = "validation_dice_"  # before a class's name in the history's columns


def losses(run: Run) -> html.Chapter:
    """Shows loss curves, and the epochs that are left to train."""
    blocks: list[html.Block] = []
    wanted = run.whole("epochs")
    done = len(run.epochs.get("epoch", ()))
    if wanted is not None and done < wanted:
        blocks.append(
            html.Notice(
                f"This run is not finished: {done} of {wanted} epochs are done. To go on:",
                f"hyperslab train {quote(str(run.path / 'recipe.yaml'))} --resume --output "
                f"{quote(str(run.path))}",
            )
        )
    if run.stride > 1:
        thin = f"This report shows one of {run.stride} steps, and the last one."
        blocks.append(html.Notice(thin))
    blocks += _not_finite(run)
    pictures = []
    measure = LOSS_NAMES.get(str(run.setting("loss")), "loss")
    if run.epochs:
        pictures.append(_loss_by_epoch(run, measure))
        pictures += _dice_by_epoch(run)
    if run.steps:
        pictures.append(loss_by_step(run.steps, measure=measure))
    blocks.append(html.Figures(pictures) if pictures else "No step is done yet.")
    blocks += _layers(run)
    return html.Chapter("losses", "Losses", blocks)


def _layers(run: Run) -> Iterator[html.Block]:
    """Shows what layers have in common for all samples, and their gradients, if recorded."""
    if not run.layers:
        return
    steps = [*run.layers]
    names = [*run.layers[steps[0]]]
    some = np.linspace(0, len(steps) - 1, min(len(steps), len(SERIES))).round().astype(int)
    shown = [steps[i] for i in some]

    def values(step: int, key: str) -> FloatArray:
        rows = run.layers[step]
        return np.array([rows.get(name, {}).get(key, np.nan) for name in names])

    pictures = []
    for key, what, title in LAYER_FIGURES:
        canvas = Canvas(f"layers-{key}")
        for step, colour in zip(shown, SERIES, strict=False):
            numbers = values(step, key)
            canvas.curve(np.arange(1, len(names) + 1), numbers, label=f"step {step}", color=colour)
        if key == "ratio":
            canvas.log_if_wide(*(values(step, key) for step in shown))
        canvas.axes.set(xlabel="layer", ylabel=what)
        canvas.whole_ticks()
        canvas.legend()
        words = f"{title}, of {counted(len(names), 'layer')} in the order of the forward pass"
        pictures.append(
            canvas.picture(title=title, alt=f"{words}, in steps {shown}.", caption=f"{words}.")
        )
    first, last = run.layers[steps[0]], run.layers[steps[-1]]
    head = ["layer", "", *LAYER_TABLE]
    rows: list[TableRow] = [
        [str(i), name, *(_then_and_now(first[name], last.get(name, {}), k) for k in LAYER_TABLE)]
        for i, name in enumerate(names, start=1)
    ]
    yield html.Heading("Layers")
    yield html.Figures(pictures)
    yield Table(f"Layers in step {steps[0]}, and in step {steps[-1]}.", head, rows)


LAYER_FIGURES = (
    ("common", "common to all samples", "Share of energy common to all samples"),
    ("ratio", "gradient / weight", "Norm of the gradient over that of the weights"),
)
LAYER_TABLE = ("mean", "std", "common", "ratio")


def _then_and_now(then: dict[str, float], now: dict[str, float], key: str) -> str:
    return " → ".join(number(row.get(key)) for row in (then, now))


def _not_finite(run: Run) -> Iterator[html.Notice]:
    """Warns about losses that are NaN or infinite, which figures leave out."""
    for table, column, what in ((run.steps, "step", "loss"), (run.epochs, "epoch", "train_loss")):
        bad = np.flatnonzero(~np.isfinite(table.get(what, np.array([]))))
        if len(bad):
            first = int(table[column][bad[0]]) + (column == "epoch")
            yield html.Notice(
                f"The training loss of {len(bad)} of {counted(len(table[column]), column)} is not "
                f"a finite number, first in {column} {first}; the figures leave them out."
            )


def _loss_by_epoch(run: Run, measure: str) -> Picture:
    """Draws training and validation loss by epoch (Oyama et al. 2020, figure 9).

    Where the loss is a squared error, so is that of always predicting the training mean.
    """
    canvas = Canvas("loss-epoch")
    epochs = run.epochs
    epoch = epochs["epoch"] + 1
    for name, colour, style in (("train", FIRST, "-"), ("validation", SECOND, "--")):
        values = epochs[f"{name}_loss"]
        if np.isfinite(values).any():
            canvas.curve(epoch, values, label=name, color=colour, linestyle=style)
    found = [row.get("mse_of_mean") for row in run.errors.values()]
    of_mean = [value for value in found if value is not None]
    dotted = ""
    if of_mean and run.setting("loss") == "mse":
        level = float(np.mean(of_mean))
        canvas.axes.axhline(level, color=MUTED, linestyle=":", label="predicting the mean")
        dotted = f" Dotted: always predicting the training mean ({run.split} split)."
    canvas.log_if_wide(epochs["train_loss"], epochs["validation_loss"])
    canvas.whole_ticks()
    canvas.axes.set(xlabel="epoch", ylabel=measure)
    canvas.legend()
    loss = epochs["validation_loss"]
    best, at = "no validation loss", ""
    if np.isfinite(loss).any():
        place = int(np.nanargmin(loss))
        best, at = f"best validation loss {number(loss[place])}", f" in epoch {epoch[place]:.0f}"
    return canvas.picture(
        title="Loss by epoch",
        alt=f"Training and validation loss over {counted(len(epoch), 'epoch')}; "
        f"the training loss ends at {number(epochs['train_loss'][-1])}, {best}.",
        caption=f"{measure[:1].upper()}{measure[1:]}; {best}{at}.{dotted}",
    )


def _dice_by_epoch(run: Run) -> Iterator[Picture]:
    """Draws Dice of the validation split by epoch, a line for each class but the background."""
    columns = [name for name in run.epochs if name.startswith(DICE_COLUMN)][1:]
    if not columns:
        return
    canvas = Canvas("dice-epoch")
    epoch = run.epochs["epoch"] + 1
    ends = []
    for i, column in enumerate(columns):
        name = column.removeprefix(DICE_COLUMN)
        style = {"color": SERIES[i % 3], "linestyle": ("-", "--", ":", "-.")[i % 4]}
        canvas.curve(epoch, run.epochs[column], label=name, **style)
        ends.append(f"{name} {number(run.epochs[column][-1])}")
    canvas.axes.set(xlabel="epoch", ylabel="Dice", ylim=(-0.02, 1.02))
    canvas.axes.locator_params(axis="x", integer=True, nbins=6)
    canvas.legend()
    told = f"in the end: {', '.join(ends)}."
    yield canvas.picture(
        title="Dice by epoch",
        alt=f"Dice of the validation split over {len(epoch)} epochs, {told}",
        caption=f"All voxels of the validation split together; {told}",
    )


def loss_by_step(steps: Columns, *, measure: str) -> Picture:
    """Draws the loss of every mini-batch, and its running median."""
    canvas = Canvas("loss-step")
    step = steps["step"]
    loss = steps["loss"]
    chosen = evenly(len(step))
    canvas.curve(step[chosen], loss[chosen], label="step", color=FIRST, alpha=0.55, linewidth=1)
    if len(step) >= 10:
        smooth = running_median(loss, chosen)
        canvas.axes.plot(step[chosen], smooth, color=SECOND, linewidth=2, label="running median")
    canvas.log_if_wide(loss)
    canvas.whole_ticks()
    canvas.axes.set(xlabel="step", ylabel=measure)
    canvas.legend()
    return canvas.picture(
        title="Loss by step",
        alt=f"Loss of {len(step)} training steps, from {number(loss[0])} to {number(loss[-1])}.",
        caption="The loss of each mini-batch, as it was trained.",
    )


def running_median(values: FloatArray, places: NDArray[np.int64]) -> FloatArray:
    """Computes the median around values at places; the window is a twentieth of all, at least 5.

    NaN where there is no value around.
    """
    half = max(2, len(values) // 40)
    padded = np.pad(values, half, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)[places]
    medians = np.full(len(places), np.nan)
    known = np.isfinite(windows).any(axis=1)
    medians[known] = np.nanmedian(windows[known], axis=1)
    return medians


FLOP_UNITS = ((1e15, "Pflop"), (1e12, "Tflop"), (1e9, "Gflop"), (1e6, "Mflop"), (1.0, "flop"))


def speed(run: Run) -> html.Chapter:
    """Shows throughput, memory, arithmetic and waiting by step, over all ranks together."""
    steps = run.steps
    if not steps:
        nothing = "No step is done yet, so nothing has been measured."
        return html.Chapter("speed", "Speed and memory", [nothing])
    figures = html.Figures(list(_by_step(steps)), "medium")
    return html.Chapter("speed", "Speed and memory", [figures])


def _known(steps: Columns, column: str) -> bool:
    return bool(np.isfinite(steps.get(column, np.array([]))).any())


def _by_step(steps: Columns) -> Iterator[Picture]:
    """Draws what was measured of every step, each from zero up."""
    count = f"{len(steps['step'])} steps"
    rate = steps["samples_per_second"]
    median = float(np.nanmedian(rate))
    canvas = _over_steps("throughput", steps, rate, "samples / s", FIRST)
    canvas.axes.axhline(median, color=MUTED, linewidth=1, linestyle="--")
    pace = float(np.nanmedian(steps["step_seconds"]))
    yield canvas.picture(
        title="Throughput",
        alt=f"Samples per second over {count}; the median is {number(median)}.",
        caption=f"All ranks together; median {number(median)} samples/s (dashed), "
        f"{number(pace)} s a step.",
    )
    if _known(steps, "memory_bytes"):
        used = steps["memory_bytes"]
        peak = float(np.nanmax(used))
        scale, unit = scale_of(peak)
        yield _over_steps("memory", steps, used / scale, f"memory [{unit}]", THIRD).picture(
            title="Memory",
            alt=f"Highest memory of all ranks over {count}; the peak is {size(peak)}.",
            caption=f"The most that any rank had held by then; {size(peak)} at the end.",
        )
    if _known(steps, "flops_per_second"):
        rate = steps["flops_per_second"]
        median = float(np.nanmedian(rate))
        scale, unit = next((s, u) for s, u in FLOP_UNITS if median >= s or s == 1)
        words = f"median {number(median / scale)} {unit}/s"
        if _known(steps, "peak_share"):
            words += f", {number(100 * float(np.nanmedian(steps['peak_share'])))} % of the peak"
        yield _over_steps("flops", steps, rate / scale, f"{unit}/s", THIRD).picture(
            title="Arithmetic",
            alt=f"Floating-point operations per second over {count}; {words}.",
            caption=f"Convolutions and products of matrices, all ranks together; {words}.",
        )
    share = 100 * steps["wait_seconds"] / np.maximum(steps["step_seconds"], 1e-9)
    overall = f"{number(100 * _waiting_share(steps))} % overall"
    yield _over_steps("waiting", steps, share, "waiting for data [%]", SECOND).picture(
        title="Waiting for data",
        alt=f"Share of each of {count} spent waiting for data; {overall}.",
        caption=f"Share of the step that the slowest rank had no data; {overall}.",
    )


def _waiting_share(steps: Columns) -> float:
    """Computes the time spent waiting for data over that of all steps."""
    return float(np.nansum(steps["wait_seconds"]) / max(np.nansum(steps["step_seconds"]), 1e-9))


def _over_steps(name: str, steps: Columns, values: FloatArray, unit: str, colour: str) -> Canvas:
    """Draws every step faintly and the running median on top, from zero up."""
    canvas = Canvas(name, width=360, height=230)
    step = steps["step"]
    chosen = evenly(len(step))
    few = len(step) < FEW_POINTS
    faint = 1.0 if few else 0.5
    canvas.curve(step[chosen], values[chosen], color=colour, alpha=faint, linewidth=1)
    smooth = running_median(values, chosen)
    if not few:
        canvas.axes.plot(step[chosen], smooth, color=colour, linewidth=2)
    # A slow first step must not flatten all the others.
    top = max(float(np.nanmax(smooth)), float(np.nanpercentile(values, 98)))
    canvas.axes.set(xlabel="step", ylabel=unit, ylim=(0, 1.15 * top if top > 0 else 1))
    canvas.whole_ticks()
    return canvas


def lede(run: Run) -> str:
    """Sums the run up in one sentence."""
    grid = times(f"{axis} {n}" for axis, n in run.grid.items() if n > 1)
    ranks = math.prod(run.grid.values())
    parts = [
        " ".join(str(k) for k in (run.called("model"), run.setting("model.variant")) if k),
        f"{ranks} ranks: {grid}" if ranks > 1 else "one rank",
        counted(len(run.epochs.get("epoch", ())), "epoch"),
    ]
    return " · ".join(part for part in parts if part)


def key_numbers(run: Run) -> Iterator[html.Tile]:
    """Lists the numbers one looks for first; those that are not there yet are left out."""
    for name, dice in dice_of(run.scores):
        yield html.Tile(f"Dice: {name}", number(dice), f"of the voxels, {run.split} split")
    if ratios := ratios_of(run):
        names = learnt_parameters(ratios)
        which = ", ".join(map(label, names)) or "none"
        remark = f"{which}: less error than the mean, 95 %"
        yield html.Tile("Learnt", f"{len(names)} of {len(ratios)}", remark)
    if _known(run.epochs, "validation_loss"):
        loss = run.epochs["validation_loss"]
        at = int(np.nanargmin(loss))
        epoch = run.epochs["epoch"][at] + 1
        yield html.Tile("Best validation loss", number(loss[at]), f"epoch {epoch:.0f}")
    if not run.steps:
        return
    rate = float(np.nanmedian(run.steps["samples_per_second"]))
    yield html.Tile("Throughput", number(rate), "samples/s, median")
    if _known(run.steps, "memory_bytes"):
        peak = float(np.nanmax(run.steps["memory_bytes"]))
        yield html.Tile("Peak memory", size(peak), "of any one rank")
    waited = number(100 * _waiting_share(run.steps))
    yield html.Tile("Waiting for data", f"{waited} %", "of all step time")
    if run.epochs:
        total = float(np.nansum(run.epochs["seconds"]))
        epochs = counted(len(run.epochs["epoch"]), "epoch")
        yield html.Tile("Training time", duration(total), epochs)


SETTINGS = {
    "model": "model.name",
    "variant": "model.variant",
    "channels": "model.channels",
    "levels": "model.levels",
    "batch norm": "model.batch_norm",
    "loss": "loss",
    "data": "",
    "batch size": "data.batch_size",
    "optimizer": "optimizer.name",
    "learning rate": "optimizer.learning_rate",
    "precision": "precision",
    "device": "device",
    "seed": "seed",
}
CALLED = {"model.name": "model", "optimizer.name": "optimizer", "loss": "loss"}
"""Lists settings that may be targets, by the section that says so."""


def provenance(run: Run) -> html.Chapter:
    """Shows what was run, on what, and the whole recipe."""
    facts = [
        (what, {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value))
        for what, value in _facts(run)
        if value is not None
    ]
    recipe = yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)
    blocks: list[html.Block] = [html.FactList(facts), *_changes(run)]
    return html.Chapter("run", "The run", [*blocks, html.Details("The whole recipe", recipe)])


def _facts(run: Run) -> Iterator[tuple[str, Any]]:
    """Lists everything that says where the numbers come from; None where it is not known."""
    for what, key in SETTINGS.items():
        setting = run.called(CALLED[key]) if key in CALLED else run.setting(key)
        yield what, run.data if what == "data" else setting
    yield "grid", times(f"{axis} {n}" for axis, n in run.grid.items())
    if run.started is not None:
        yield "training started", f"{run.started:%Y-%m-%d %H:%M} UTC"
    if run.epochs:
        yield "training took", duration(float(np.nansum(run.epochs["seconds"])))
    of = run.evaluation
    if isinstance(of.get("weights"), int):
        yield "weights", f"{of['weights']:,}"
    if "date" in of:
        yield "evaluated", f"{_minute(of['date'])} UTC"
    if isinstance(of.get("seconds"), float):
        yield "evaluation took", duration(of["seconds"])
    yield "evaluated on", of.get("device")
    if isinstance(of.get("versions"), dict):
        yield "versions", ", ".join(f"{k} {v}" for k, v in of["versions"].items()) or None


def _minute(date: object) -> str:
    """Writes an ISO date without its seconds."""
    return str(date)[:16].replace("T", " ")


def _changes(run: Run) -> Iterator[html.Block]:
    """Shows how the recipe changed when the run was resumed."""
    path = run.path / CHANGES
    if not path.exists():
        return
    rows: list[TableRow] = []
    try:
        for one in read_json_lines(path)[0]:
            for key, values in one["changes"].items():
                before, now = (DASH if value is None else str(value) for value in values)
                rows.append([str(key), before, now, str(one["step"]), _minute(one["date"])])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} holds no changes of a recipe: {error!r}") from None
    if rows:
        caption = "What was changed when the run was resumed; the recipe is that of the last steps"
        yield Table(caption, ["key", "before", "from then on", "after step", "date [UTC]"], rows)
