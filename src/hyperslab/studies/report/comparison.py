"""Compares runs on one page: figures 9 and 10 of Oyama et al. 2020, with controls and intervals.

In reading order: tables of errors over those of the mean and of a reference, with intervals; test
loss by epoch and by time (figure 9); true against predicted and residuals (figure 10); the Dice of
each class, over the seeds; two runs side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hyperslab.errors import printable
from hyperslab.recipe.compare import differences
from hyperslab.studies import configurations
from hyperslab.studies.report.canvas import (
    DASHES,
    FIRST,
    INK,
    MUTED,
    SECOND,
    Canvas,
    Picture,
    cut_short,
    series_style,
)
from hyperslab.studies.report.chapters import LOSS_NAMES
from hyperslab.studies.report.html import Block, Chapter, Figures, Heading
from hyperslab.studies.run_folder import Run, folder_names
from hyperslab.studies.table import DASH, MINUS, Table, TableCell, TableRow, counted, label, number
from hyperslab.train.metrics import CONFIDENCE, FloatArray, means_of_volumes
from hyperslab.train.uncertainty import LEVELS

POWERS = {"mse": 2, "l1": 1}  # of differences whose mean a loss is; controls, too, have such a loss

HOUR = 3600.0
MINUTE = 60.0


def comparison_chapters(comparison: configurations.Comparison) -> list[Chapter]:
    """Writes the chapters on all configurations, on figure 9 and on figure 10."""
    return [
        Chapter("comparison", "All configurations", _error_tables(comparison)),
        Chapter("figure-9", "Test loss by epoch and by time", _losses_by_configuration(comparison)),
        Chapter("figure-10", "True against predicted", _predictions(comparison)),
    ]


def comparison_numbers(comparison: configurations.Comparison) -> dict[str, Any]:
    """Lists all numbers as plain values, for JSON and for the tables."""
    reference = comparison.reference
    keys = (configurations.MEAN_CONTROL, *comparison.parameters)
    return {
        "test_volumes": len(reference.volumes),
        "confidence": CONFIDENCE,
        "parameters": list(comparison.parameters),
        "reference": reference.name,
        "rows": [
            {
                "name": row.name,
                "control": row in comparison.controls,
                "seeds": len(row.seeds),
                "samples": len(row.seeds[0].volumes),
                "ratio": {key: asdict(row.ratio(key)) for key in keys},
                "ratio_by_seed": {key: row.ratios(key).tolist() for key in keys},
                "to_reference": {
                    key: asdict(row.ratio_to(reference, key)) if row is not reference else None
                    for key in keys
                },
            }
            for row in comparison.rows
        ],
    }


def _error_tables(comparison: configurations.Comparison) -> list[Block]:
    """Shows errors over those of predicting the mean, and over those of the reference."""
    numbers = comparison_numbers(comparison)
    keys = (configurations.MEAN_CONTROL, *numbers["parameters"])
    few = numbers["test_volumes"] < configurations.FEWEST_VOLUMES

    def cell(value: float, interval: dict[str, float]) -> TableCell:
        """Makes a cell of a number and its interval, of which few volumes say nothing."""
        ends = f"{number(interval['lower'])} {DASH} {number(interval['upper'])}"
        return TableCell(number(value), below="" if few else ends)

    to_mean: list[TableRow] = []
    to_reference: list[TableRow] = []
    for row in numbers["rows"]:
        seeds = f"{counted(row['seeds'], 'seed')}, {row['samples']} test samples"
        name = TableCell(row["name"], below="control" if row["control"] else seeds)
        medians = {key: float(np.median(row["ratio_by_seed"][key])) for key in keys}
        to_mean.append([name, *(cell(medians[key], row["ratio"][key]) for key in keys)])
        others = [row["to_reference"][key] for key in keys]
        if others[0] is not None:
            to_reference.append([row["name"], *(cell(one["value"], one) for one in others)])
    to_mean.append(["predicting the mean", *["1"] * len(keys)])
    head = ["configuration", "mean", *map(label, numbers["parameters"])]
    words = (
        f"{numbers['test_volumes']} test volumes, the same for all. A network that sees parts of "
        "volumes predicts once for each part. Averaged and recalibrated means: the mean of a "
        "volume's predictions, corrected by a line for each parameter that is fitted to the "
        "volumes of the validation split. Intervals come from a bootstrap over volumes, drawn "
        "together for all configurations, with the seeds as a second level; with fewer than "
        f"{configurations.FEWEST_VOLUMES} volumes there are none."
    )
    error = "Mean squared error over that of"
    interval = "95 % interval"
    medians_of = (
        f"predicting the mean: median over seeds, and the {interval} of the mean over seeds"
    )
    blocks: list[Block] = [words, Table(f"{error} {medians_of}", head, to_mean)]
    if to_reference:
        title = f"{error} {numbers['reference']}, and its {interval}"
        blocks.append(Table(title, head, to_reference))
    return [*blocks, *_coverages(comparison)]


def _coverages(comparison: configurations.Comparison) -> list[Block]:
    """Tables how often predicted intervals hold the true values; empty where none are predicted."""
    rows: list[TableRow] = []
    for row in comparison.rows:
        found = [row.coverages(level / 100) for level in LEVELS]
        cells = [
            " / ".join(f"{number(100 * share)} %" for share in shares)
            for shares in zip(*(one.mean(0) for one in found if one is not None), strict=True)
        ]
        if cells:
            rows.append([row.name, *cells])
    levels = " / ".join(f"{level} %" for level in LEVELS)
    head = ["configuration", *map(label, comparison.parameters)]
    title = f"Share of true values in predicted intervals of {levels}, mean over seeds"
    return [Table(title, head, rows)] if rows else []


@dataclass(frozen=True, slots=True)
class Curve:
    """Holds a configuration's losses by epoch (S, E), and the end of each epoch (S, E) [s]."""

    losses: FloatArray
    seconds: FloatArray
    followed: bool  # the test split's; else the validation's


def curve_of(configuration: configurations.Configuration) -> Curve | None:
    """Stacks the losses as far as all seeds are; running minima where volumes are cut apart.

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


def _loss_in_common(comparison: configurations.Comparison) -> str | None:
    """Names the loss that all runs have been trained on, if it is one."""
    runs = [run for one in comparison.configurations for run in one.runs]
    names = {run.setting("loss") if isinstance(run.setting("loss"), str) else None for run in runs}
    return names.pop() if len(names) == 1 else None


def _losses_by_configuration(comparison: configurations.Comparison) -> list[Block]:
    loss = _loss_in_common(comparison)
    words = "The loss that was trained, of the normalised parameters (Oyama et al. 2020, figure 9)."
    if loss in POWERS:
        words += (
            " The level lines are controls: predicting the mean of the training split, and those "
            "that were given."
        )
    elif loss is None:
        words += " The runs were trained on different losses, which cannot be compared."
    pictures = loss_curves(comparison)
    return [words, Figures(pictures) if pictures else "No epoch is done yet."]


def loss_curves(comparison: configurations.Comparison) -> list[Picture]:
    """Draws losses by epoch and by time: medians over seeds, with the range as a band.

    Levels are of what only predicts, where the loss is a mean of (squared) differences.
    """
    found = {one.name: curve_of(one) for one in comparison.configurations}
    curves = {name: curve for name, curve in found.items() if curve is not None}
    if not curves:
        return []
    longest = max(float(np.median(curve.seconds, 0)[-1]) for curve in curves.values())
    unit, word = _time_unit(longest)
    return [
        _loss_figure(comparison, curves, "epoch", None, "epoch"),
        _loss_figure(comparison, curves, "time", unit, f"training time [{word}]"),
    ]


def _time_unit(longest: float) -> tuple[float, str]:
    """Chooses the unit [s] of an axis up to the longest time [s], and its name."""
    if longest > 2 * HOUR:
        return HOUR, "h"
    return (MINUTE, "min") if longest > 2 * MINUTE else (1.0, "s")


def _loss_figure(
    comparison: configurations.Comparison,
    curves: Mapping[str, Curve],
    key: str,
    unit: float | None,
    axis: str,
) -> Picture:
    """Draws all losses over epochs, or over time in a unit [s]."""
    canvas = Canvas(f"figure-9-{key}", width=520, height=420)
    loss = _loss_in_common(comparison)
    power = POWERS.get(loss or "")
    missing = []
    dotted = ""
    for place, one in enumerate(comparison.configurations):
        if one.name not in curves:
            missing.append(one.name)
            continue
        curve = curves[one.name]
        x = np.arange(curve.losses.shape[1]) + 1.0
        if unit is not None:
            x = np.median(curve.seconds, 0) / unit
        style = series_style(place)
        colour = style["color"]
        canvas.curve(x, np.median(curve.losses, 0), label=one.name, markersize=3, **style)
        if len(curve.losses) > 1:
            ends = (curve.losses.min(0), curve.losses.max(0))
            canvas.axes.fill_between(x, *ends, color=colour, alpha=0.15, linewidth=0)
        if one.averaged is not None and power is not None:
            level = _control_level(one.averaged, power)
            canvas.axes.axhline(level, color=colour, linewidth=1.2, linestyle=":")
            dotted = " Dotted: sub-volumes' predictions averaged over a universe and recalibrated."
    of_mean = _draw_controls(canvas, comparison, power) if power is not None else ""
    if all(np.nanmin(curve.losses, initial=np.inf) > 0 for curve in curves.values()):
        canvas.log()
    if unit is None:
        canvas.whole_ticks()
    split = "test" if all(curve.followed for curve in curves.values()) else "validation"
    measure = f": {LOSS_NAMES[loss]}" if loss in LOSS_NAMES else ""
    canvas.axes.set(xlabel=axis, ylabel=f"{split} loss{measure}")
    canvas.legend()
    at_the_end = "; ".join(
        f"{name} {number(float(np.median(curve.losses, 0)[-1]))}" for name, curve in curves.items()
    )
    caption = "Median over seeds, with the range as a band"
    if split == "validation":
        caption = "The runs did not follow the test loss (follow_test): validation. " + caption
    if any(one.of_parts for one in comparison.configurations):
        caption += "; for sub-volumes the running minimum"
    without = f" No epoch is done of {', '.join(missing)}." if missing else ""
    return canvas.picture(
        title=f"{split.capitalize()} loss by {key}",
        alt=f"Loss by {key}; at the end: {at_the_end}{of_mean}.",
        caption=f"{caption}.{dotted}{without}",
    )


def _draw_controls(canvas: Canvas, comparison: configurations.Comparison, power: int) -> str:
    """Draws the controls as level lines, and puts the first, the mean's, into words."""
    squared = comparison.configurations[0].scored.of_mean
    of_mean = float((squared ** (power / 2)).mean())
    levels = [("predicting the mean", of_mean)]
    levels += [(control.name, _control_level(control, power)) for control in comparison.controls]
    for place, (name, level) in enumerate(levels):
        colour, dashes = (INK, DASHES[1 + (place - 1) % 5]) if place else (MUTED, "-")
        canvas.axes.axhline(level, color=colour, linewidth=1.5, linestyle=dashes, label=name)
    return f"; predicting the mean {number(of_mean)}"


def _control_level(scored: configurations.Scored, power: int) -> float:
    """Computes the median over seeds of the mean difference to that power."""
    of_seeds = [
        means_of_volumes(np.abs(seed.predicted - seed.true) ** power, seed.volumes).mean()
        for seed in scored.seeds
    ]
    return float(np.median(of_seeds))


def _predictions(comparison: configurations.Comparison) -> list[Block]:
    words = (
        "Normalised parameters of the test samples, by the seed with the median error (Oyama et "
        "al. 2020, figure 10). A point on the dashed line is exact; a cloud that lies flat is a "
        "network that answers with the mean."
    )
    blocks: list[Block] = [words]
    rows = comparison.rows
    for at, name in enumerate(comparison.parameters):
        scatters = [_scatter(row, at, place) for place, row in enumerate(rows)]
        blocks += [Heading(f"{label(name)}: predicted against true"), Figures(scatters, "tiny")]
    residuals = [_residuals(rows, at) for at in range(len(comparison.parameters))]
    return [*blocks, Heading("Residuals"), Figures(residuals)]


SCATTER_POINTS = 200  # the most points of each scatter plot, as in the paper
SCATTER_REACH = 1.4  # the ends of its axes either side of zero


def _scatter(row: configurations.Scored, at: int, place: int) -> Picture:
    """Draws a parameter's predictions, of the median seed of what stands in ``place``."""
    canvas = Canvas(f"figure-10-{at}-{place}", width=220, height=230)
    seed = row.typical
    true = seed.true[:, at]
    predicted = seed.predicted[:, at]
    # The same points whenever the page is made.
    chosen = np.random.default_rng(0).permutation(len(true))[:SCATTER_POINTS]
    canvas.square(SCATTER_REACH)
    canvas.axes.plot(
        true[chosen], predicted[chosen], "o", color=FIRST, alpha=0.6, markersize=4, mew=0
    )
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


def _residuals(rows: Sequence[configurations.Scored], at: int) -> Picture:
    """Draws the residuals of a parameter, all configurations and controls in one picture."""
    name = rows[0].parameters[at]
    canvas = Canvas(f"figure-10-residuals-{at}", width=520, height=70 + 30 * (len(rows) + 1))
    true = rows[0].typical.true[:, at]
    off = {row.name: (row.typical.predicted - row.typical.true)[:, at] for row in rows}
    off["predicting the mean"] = true.mean() - true
    axes = canvas.axes
    axes.boxplot(
        list(off.values()),
        orientation="horizontal",
        tick_labels=[cut_short(printable(name), configurations.LONGEST_NAME) for name in off],
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


DICE_WORDS = (
    "Dice of all voxels of the test split together: the median over the seeds, and the least to "
    "the greatest where there are several. The mean is over the classes but the background."
)


def class_chapter(compared: configurations.ClassComparison) -> Chapter:
    """Writes the chapter on classes."""
    rows = []
    for (name, runs), dice in zip(compared.named, compared.dice, strict=True):
        means = dice[:, 1:].mean(1, keepdims=True)
        spreads = [_seed_spread(column) for column in np.concatenate([means, dice], axis=1).T]
        rows.append([name, str(len(runs)), *spreads])
    head = ["configuration", "seeds", "mean", *map(label, compared.classes)]
    table = Table("Dice by class", head, rows)
    return Chapter("comparison", "All configurations", [DICE_WORDS, table])


def _seed_spread(values: FloatArray) -> str:
    if not np.isfinite(values).all():
        return DASH
    middle = number(float(np.median(values)))
    if len(values) == 1:
        return middle
    return f"{middle} ({number(float(values.min()))} to {number(float(values.max()))})"


UNCOMPARED_KEYS = ("output",)  # keys of recipes that always differ


def two_runs(run: Run, other: Run, problem: str = "") -> Chapter:
    """Sets two runs side by side; ``problem`` says why their errors cannot be compared."""
    names = folder_names([run.path, other.path])
    blocks = [what_differs([run, other], names), *_loss_blocks([run, other], names)]
    if problem:
        blocks.append(f"Their errors are not compared: {problem}")
    return Chapter("two-runs", f"{names[0]} and {names[1]}", blocks)


def what_differs(runs: Sequence[Run], names: Sequence[str]) -> Block:
    """Tables the keys whose values are not the same in all recipes."""
    found = [key for other in runs[1:] for key in differences(runs[0].recipe, other.recipe)]
    keys = [key for key in dict.fromkeys(found) if key not in UNCOMPARED_KEYS]
    if not keys:
        return "Their recipes are the same."
    rows = []
    for key in keys:
        settings = [run.setting(key) for run in runs]
        rows.append([key, *(DASH if value is None else str(value) for value in settings)])
    return Table("What differs in their recipes", ["key", *names], rows)


def _loss_blocks(runs: Sequence[Run], names: Sequence[str]) -> list[Block]:
    """Draws the losses on one scale; different losses each on a scale of its own."""
    named = dict(zip(names, runs, strict=True))
    empty = [name for name, run in named.items() if not run.epochs]
    if empty:
        words = " and ".join(empty)
        return [f"Losses are not compared: no epoch of {words} is done."]
    if runs[0].setting("loss") == runs[1].setting("loss"):
        return [Figures([_losses_of_two(named, timed) for timed in (False, True)])]
    kinds = " and ".join(str(run.called("loss")) for run in runs)
    pictures = [_losses_of_two(named, timed, one) for one in named for timed in (False, True)]
    return [
        f"They were trained on different losses, {kinds}, which cannot be compared: each "
        "has a scale of its own.",
        Figures(pictures),
    ]


def _losses_of_two(named: Mapping[str, Run], timed: bool, alone: str = "") -> Picture:
    """Draws the validation (thick) and training losses (thin) of two runs, or of one ``alone``."""
    key = "time" if timed else "epoch"
    drawn = [
        (place, name, run.epochs)
        for place, (name, run) in enumerate(named.items())
        if alone in ("", name)
    ]
    canvas = Canvas(f"two-runs-{key}" + (f"-{1 + drawn[0][0]}" if alone else ""))
    unit, word = _time_unit(max(float(np.nansum(epochs["seconds"])) for _, _, epochs in drawn))
    least = []
    for place, name, epochs in drawn:
        x = np.cumsum(epochs["seconds"]) / unit if timed else epochs["epoch"] + 1
        style = series_style(place)
        loss = epochs["validation_loss"]
        canvas.curve(x, loss, linewidth=2, label=name, **style)
        canvas.curve(x, epochs["train_loss"], linewidth=1, alpha=0.6, markersize=2, **style)
        least.append(f"{name} {number(float(np.nanmin(loss, initial=np.inf)))}")
    columns = ("train_loss", "validation_loss")
    canvas.log_if_wide(*(epochs[column] for _, _, epochs in drawn for column in columns))
    if not timed:
        canvas.whole_ticks()
    canvas.axes.set(xlabel=f"training time [{word}]" if timed else "epoch", ylabel="loss")
    canvas.legend()
    told = f"least validation loss: {', '.join(least)}"
    return canvas.picture(
        title=f"Losses by {key}" + (f", {alone}" if alone else ""),
        alt=f"Validation and training losses by {key}; {told}.",
        caption=f"Thick: validation, thin: training; {told}.",
    )
