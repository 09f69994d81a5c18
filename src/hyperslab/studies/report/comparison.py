"""Compares runs on one page: figures 9 and 10 of Oyama et al. 2020, with controls and intervals.

In reading order: test loss by epoch and by time (figure 9); true against predicted and residuals
(figure 10); tables of errors over those of the mean and of a reference, with intervals; the
chapters that hold them; the Dice of each class, over the seeds; two runs side by side;
`write_comparison`, which writes the page and its numbers as JSON.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.errors import DataError, printable, reason
from hyperslab.recipe.compare import differences
from hyperslab.studies.number_format import DASH, MINUS, label, number
from hyperslab.studies.report.canvas import (
    FIRST,
    INK,
    MUTED,
    SECOND,
    SERIES,
    Canvas,
    FigureFormat,
    Picture,
    cut_short,
    figures_beside,
    write_figures,
)
from hyperslab.studies.report.configurations import (
    LONGEST_NAME,
    MEAN_CONTROL,
    Comparison,
    Configuration,
    Scored,
    named_runs,
    read_comparison,
)
from hyperslab.studies.report.html import (
    Block,
    Chapter,
    Figures,
    Heading,
    Page,
    Paragraph,
    render_page,
)
from hyperslab.studies.report.plots import (
    FEWEST_VOLUMES,
    LOSS_NAMES,
    log_if_wide,
    whole_number_ticks,
)
from hyperslab.studies.run_folder import Run, folder_names, read_evaluation, read_words
from hyperslab.studies.table import Table, TableCell, TableRow
from hyperslab.train.metrics import CONFIDENCE, ConfidenceInterval, FloatArray, means_of_volumes
from hyperslab.util.atomic_files import write_json, write_text

DASHES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (2, 1)))
"""Gives each configuration a line style: figures are to be read without colours, too."""

POWERS = {"mse": 2, "l1": 1}
"""Gives the power of differences whose mean a loss is; controls, too, have such a loss."""

HOUR = 3600.0
MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Curve:
    """Holds a configuration's losses by epoch (S, E), and the end of each epoch (S, E) [s]."""

    losses: FloatArray
    seconds: FloatArray
    followed: bool  # the test split's; else the validation's


def curve_of(configuration: Configuration) -> Curve | None:
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


def loss_in_common(comparison: Comparison) -> str | None:
    """Names the loss that all runs have been trained on, if it is one."""
    runs = [run for one in comparison.configurations for run in one.runs]
    names = {run.setting("loss") if isinstance(run.setting("loss"), str) else None for run in runs}
    return names.pop() if len(names) == 1 else None


def loss_curves(comparison: Comparison) -> list[Picture]:
    """Draws losses by epoch and by time: medians over seeds, with the range as a band.

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
        _loss_figure(comparison, curves, "epoch", None, "epoch", followed),
        _loss_figure(comparison, curves, "time", unit, f"training time [{word}]", followed),
    ]


def _loss_figure(
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
                _control_level(one.averaged, power),
                color=SERIES[place % len(SERIES)],
                linewidth=1.2,
                linestyle=":",
            )
    of_mean = _draw_controls(canvas, comparison, power) if power is not None else ""
    if all(np.nanmin(curve.losses, initial=np.inf) > 0 for curve in curves.values()):
        canvas.log()
    if unit is None:
        whole_number_ticks(canvas)
    what = "test loss" if followed else "validation loss"
    measure = f": {LOSS_NAMES[loss]}" if loss in LOSS_NAMES else ""
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
    """Draws the ``place``-th curve over epochs, or time in ``unit`` [s], with its band."""
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
    """Draws the controls as level lines, and puts the first, the mean's, into words."""
    squared = comparison.configurations[0].scored.of_mean
    of_mean = float((squared ** (power / 2)).mean())
    canvas.axes.axhline(of_mean, color=MUTED, linewidth=1.5, label="predicting the mean")
    for place, control in enumerate(comparison.controls):
        canvas.axes.axhline(
            _control_level(control, power),
            color=INK,
            linewidth=1.5,
            linestyle=DASHES[1 + place % 5],
            label=control.name,
        )
    return f"; predicting the mean {number(of_mean)}"


def _control_level(scored: Scored, power: int) -> float:
    """Computes the median over seeds of the mean difference to that power."""
    of_seeds = [
        means_of_volumes(np.abs(seed.predicted - seed.true) ** power, seed.volumes).mean()
        for seed in scored.seeds
    ]
    return float(np.median(of_seeds))


SCATTER_POINTS = 200
"""Limits the points of each scatter plot, as in the paper."""

SCATTER_REACH = 1.4
"""Ends its axes either side of zero."""


def scatters(comparison: Comparison, parameter: str) -> list[Picture]:
    """Draws the median seed of each configuration, average and control."""
    at = comparison.parameters.index(parameter)
    return [_scatter(row, at, place) for place, row in enumerate(comparison.rows)]


def _scatter(row: Scored, at: int, place: int) -> Picture:
    canvas = Canvas(f"figure-10-{at}-{place}", width=220, height=230)
    seed = row.typical
    true = seed.true[:, at]
    predicted = seed.predicted[:, at]
    chosen = np.random.default_rng(0).permutation(len(true))[:SCATTER_POINTS]
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
    """Draws a picture for each parameter, all configurations and controls in it."""
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


def comparison_numbers(comparison: Comparison) -> dict[str, Any]:
    """Lists all numbers as plain values, for JSON and for the tables."""
    reference = comparison.reference
    keys = (MEAN_CONTROL, *comparison.parameters)
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


def errors_table(numbers: dict[str, Any]) -> Table:
    """Shows errors over those of predicting the mean: median over seeds, interval."""
    keys = (MEAN_CONTROL, *numbers["parameters"])
    few = numbers["test_volumes"] < FEWEST_VOLUMES
    rows: list[TableRow] = [
        [
            TableCell(row["name"], below=_seeds(row)),
            *(
                _interval_cell(float(np.median(row["ratio_by_seed"][key])), row["ratio"][key], few)
                for key in keys
            ),
        ]
        for row in numbers["rows"]
    ]
    rows.append(["predicting the mean", *["1"] * len(keys)])
    return Table(
        "Mean squared error over that of predicting the mean: median over seeds, and the 95 % "
        "interval of the mean over seeds",
        ["configuration", "mean", *map(label, numbers["parameters"])],
        rows,
    )


def reference_table(numbers: dict[str, Any]) -> Table:
    """Shows how many times the reference's error the others have."""
    keys = (MEAN_CONTROL, *numbers["parameters"])
    rows = []
    for row in numbers["rows"]:
        found = [row["to_reference"][key] for key in keys]
        if found[0] is None:
            continue
        cells = [
            _interval_cell(one["value"], one, numbers["test_volumes"] < FEWEST_VOLUMES)
            for one in found
        ]
        rows.append([row["name"], *cells])
    return Table(
        f"Mean squared error over that of {numbers['reference']}, and its 95 % interval",
        ["configuration", "mean", *map(label, numbers["parameters"])],
        rows,
    )


def _interval_cell(value: float, interval: dict[str, float], few: bool) -> TableCell:
    """Makes a cell of a number and its interval, of which ``few`` volumes say nothing."""
    if few:
        return TableCell(number(value))
    found = ConfidenceInterval(**interval)
    ends = f"{number(found.lower)} {DASH} {number(found.upper)}"
    return TableCell(number(value), below=ends)


def _seeds(row: dict[str, Any]) -> str:
    seeds = f"{row['seeds']} seeds" if row["seeds"] > 1 else "1 seed"
    return "control" if row["control"] else f"{seeds}, {row['samples']} test samples"


def comparison_chapters(comparison: Comparison) -> list[Chapter]:
    """Writes the chapters on all configurations, on figure 9 and on figure 10."""
    return [
        Chapter("comparison", "All configurations", _error_tables(comparison)),
        Chapter("figure-9", "Test loss by epoch and by time", _losses_by_configuration(comparison)),
        Chapter("figure-10", "True against predicted", _predictions(comparison)),
    ]


def _error_tables(comparison: Comparison) -> list[Block]:
    numbers = comparison_numbers(comparison)
    words = (
        f"{numbers['test_volumes']} test volumes, the same for all. A network that sees parts of "
        "volumes predicts once for each part; averaged and recalibrated, its predictions for a "
        "volume are one: their mean, put right by a line for each parameter that is fitted to the "
        "volumes of the validation split. Intervals are by a bootstrap over volumes, drawn "
        "together for all configurations, with the seeds as a second level; with fewer than "
        f"{FEWEST_VOLUMES} volumes there are none."
    )
    tables = [errors_table(numbers)]
    if len(numbers["rows"]) > 1:
        tables.append(reference_table(numbers))
    return [Paragraph(words), *tables]


def _losses_by_configuration(comparison: Comparison) -> list[Block]:
    loss = loss_in_common(comparison)
    words = "The loss that was trained, of the normalised parameters (Oyama et al. 2020, figure 9)."
    if loss in POWERS:
        words += (
            " The level lines are controls: always predicting the mean of the training split, and "
            "what else was given."
        )
    elif loss is None:
        words += " The runs were trained on different losses, which are not to be compared."
    pictures = loss_curves(comparison)
    return [Paragraph(words), Figures(pictures) if pictures else Paragraph("No epoch is done yet.")]


def _predictions(comparison: Comparison) -> list[Block]:
    words = (
        "Normalised parameters of the test samples, by the seed with the median error (Oyama et "
        "al. 2020, figure 10). A point on the dashed line is exact; a cloud that lies flat is a "
        "network that answers with the mean."
    )
    blocks: list[Block] = [Paragraph(words)]
    for name in comparison.parameters:
        blocks += [
            Heading(f"{label(name)}: predicted against true"),
            Figures(scatters(comparison, name), "tiny"),
        ]
    blocks += [
        Heading("Residuals"),
        Figures(residual_distributions(comparison)),
    ]
    return blocks


DICE_WORDS = (
    "Dice of all voxels of the test split together: the median over the seeds, and the least to "
    "the greatest where there are several. The mean is over the classes but the background."
)


def class_chapter(paths: Sequence[Path]) -> Chapter | None:
    """Writes the chapter on classes; None where the first evaluated run predicts numbers.

    Raises:
        DataError: a run is not evaluated, has other classes than the first, or other samples.
    """
    named = [(name, runs) for name, runs in named_runs(paths) if runs]
    runs_of_all = [run for _, runs in named for run in runs]
    evaluation = next(filter(None, map(_class_evaluation, runs_of_all)), {})
    if "classes" not in evaluation:
        return None
    classes = list(evaluation["classes"])
    _check_samples(runs_of_all)
    rows = [[name, str(len(runs)), *_class_cells(runs, classes)] for name, runs in named]
    head = ["configuration", "seeds", "mean", *map(label, classes)]
    table = Table("Dice by class", head, rows)
    return Chapter("comparison", "All configurations", [Paragraph(DICE_WORDS), table])


def _class_evaluation(run: Run) -> dict[str, Any]:
    return read_evaluation(run.path / "evaluation" / "metrics.json")


def _check_samples(runs: Sequence[Run]) -> None:
    """Refuses scores of other samples; evaluations of earlier versions do not name theirs."""
    files = [run.path / "evaluation" / "samples.csv" for run in runs]
    named = [(path, sorted(read_words(path, "sample"))) for path in files if path.exists()]
    for path, samples in named:
        if samples != named[0][1]:
            raise DataError(
                f"{path}: {len(samples)} samples, which are not the {len(named[0][1])} of "
                f"{named[0][0]}: nothing can be said of their scores\n"
                "    give them the same data, seed and split"
            )


def _class_cells(runs: Sequence[Run], classes: Sequence[str]) -> list[str]:
    found = []
    for run in runs:
        scores = _class_evaluation(run).get("classes", {})
        if list(scores) != list(classes):
            raise DataError(
                f"{run.path} is not evaluated for the classes {', '.join(classes)}\n"
                f"    hyperslab evaluate {run.path}"
            )
        dice = [scores[name].get("dice") for name in classes]
        found.append([np.nan if value is None else float(value) for value in dice])
    values = np.array(found)
    means = values[:, 1:].mean(1, keepdims=True)
    return [_seed_spread(column) for column in np.concatenate([means, values], axis=1).T]


def _seed_spread(values: np.ndarray[Any, Any]) -> str:
    if not np.isfinite(values).all():
        return DASH
    middle = number(float(np.median(values)))
    if len(values) == 1:
        return middle
    return f"{middle} ({number(float(values.min()))} to {number(float(values.max()))})"


UNCOMPARED_KEYS = ("output",)
"""Lists keys of recipes that always differ."""

MINUTES_FROM = 120.0
"""Bounds the times [s] that are not given in minutes."""


def two_runs(run: Run, other: Run, problem: str = "") -> Chapter:
    """Sets two runs side by side; ``problem`` says why their errors cannot be compared."""
    names = folder_names([run.path, other.path])
    blocks: list[Block] = [what_differs([run, other], names)]
    blocks += _loss_blocks([run, other], names)
    if problem:
        blocks.append(Paragraph(f"Their errors are not compared: {problem}"))
    return Chapter("two-runs", f"{names[0]} and {names[1]}", blocks)


def what_differs(runs: Sequence[Run], names: Sequence[str]) -> Block:
    """Tables the keys whose values are not the same in all recipes."""
    found = [key for other in runs[1:] for key in differences(runs[0].recipe, other.recipe)]
    keys = [key for key in dict.fromkeys(found) if key not in UNCOMPARED_KEYS]
    if not keys:
        return Paragraph("Their recipes are the same.")
    rows = [[key, *(_setting_text(run, key) for run in runs)] for key in keys]
    return Table("What differs in their recipes", ["key", *names], rows)


def _loss_blocks(runs: Sequence[Run], names: Sequence[str]) -> list[Block]:
    """Draws the losses on one scale; different losses each on a scale of its own."""
    drawn = [
        DrawnRun(run, name, *style)
        for run, name, style in zip(runs, names, ((FIRST, "-"), (SECOND, "--")), strict=True)
    ]
    empty = [one.name for one in drawn if not one.run.epochs]
    if empty:
        words = " and ".join(empty)
        return [Paragraph(f"Losses are not compared: no epoch of {words} is done.")]
    losses = [one.run.setting("loss") for one in drawn]
    if losses[0] == losses[1]:
        return [Figures([_losses_of_two(drawn, timed) for timed in (False, True)])]
    kinds = " and ".join(str(one.run.called("loss")) for one in drawn)
    return [
        Paragraph(
            f"They were trained on different losses, {kinds}, which are not to be compared: each "
            "has a scale of its own."
        ),
        Figures([_losses_of_two([one], timed) for one in drawn for timed in (False, True)]),
    ]


def _setting_text(run: Run, key: str) -> str:
    value = run.setting(key)
    return DASH if value is None else str(value)


@dataclass(frozen=True, slots=True)
class DrawnRun:
    """Holds a run with the name, the colour and the style of its curves."""

    run: Run
    name: str
    colour: str
    style: str


def _losses_of_two(drawn: Sequence[DrawnRun], timed: bool) -> Picture:
    """Draws validation (thick) and training losses (thin) by epoch or by training time."""
    key = "time" if timed else "epoch"
    alone = len(drawn) == 1
    canvas = Canvas(f"two-runs-{key}" + (f"-{1 + SERIES.index(drawn[0].colour)}" if alone else ""))
    ends = [float(np.nansum(one.run.epochs["seconds"])) for one in drawn]
    unit, word = (60.0, "min") if max(ends) > MINUTES_FROM else (1.0, "s")
    for one in drawn:
        epochs = one.run.epochs
        x = epochs["epoch"] + 1
        if timed:
            x = np.cumsum(epochs["seconds"]) / unit
        marker = "o" if len(x) < 20 else ""
        canvas.axes.plot(
            x, epochs["validation_loss"], one.style, color=one.colour, linewidth=2, marker=marker,
            markersize=4, label=one.name,
        )  # fmt: skip
        canvas.axes.plot(
            x, epochs["train_loss"], one.style, color=one.colour, linewidth=1, alpha=0.6,
            marker=marker, markersize=2,
        )  # fmt: skip
    columns = ("train_loss", "validation_loss")
    log_if_wide(canvas, *(one.run.epochs[column] for one in drawn for column in columns))
    if timed:
        canvas.axes.set(xlabel=f"training time [{word}]", ylabel="loss")
    else:
        whole_number_ticks(canvas)
        canvas.axes.set(xlabel="epoch", ylabel="loss")
    canvas.legend()
    least = [
        f"{one.name} {number(float(np.nanmin(one.run.epochs['validation_loss'], initial=np.inf)))}"
        for one in drawn
    ]
    told = f"least validation loss: {', '.join(least)}"
    return canvas.picture(
        title=f"Losses by {key}" + (f", {drawn[0].name}" if alone else ""),
        alt=f"Validation and training losses by {key}; {told}.",
        caption=f"Thick: validation, thin: training; {told}.",
    )


def write_comparison(
    paths: Sequence[Path],
    controls: Sequence[tuple[str, Path]] = (),
    *,
    output: Path | None = None,
    numbers: Path | None = None,
    figures: Sequence[FigureFormat] = (),
) -> Path:
    """Writes one page on several runs, or on sweeps, and returns its path.

    By default it is ``report.html`` in the folder of a sweep, or ``comparison.html`` in the folder
    that all runs are in. ``numbers``: a JSON file for the numbers of its tables. ``figures``: the
    formats in which its figures are written, too, as `figures_beside` says.

    Raises:
        DataError: as `read_comparison`, or a file cannot be written.
    """
    of_classes = class_chapter(paths)
    if of_classes is not None and (controls or numbers is not None):
        raise DataError("controls and --numbers go with predicted numbers; these runs give classes")
    comparison = None if of_classes is not None else read_comparison(paths, controls)
    chapters = _by_folders(paths) if of_classes is None else [*_by_folders(paths), of_classes]
    if output is None and len(paths) == 1:
        output = paths[0] / "report.html"
    elif output is None:
        output = Path(os.path.commonpath([path.absolute() for path in paths])) / "comparison.html"
    page = Page(
        title=output.resolve().parent.name,
        lede=_comparison_lede(comparison) if comparison else "",
        chapters=[*chapters, *(comparison_chapters(comparison) if comparison else ())],
        made=f"Made by hyperslab on {datetime.datetime.now():%Y-%m-%d %H:%M}.",
        kind="comparison of runs",
    )
    try:
        write_text(output, render_page(page), concurrent=True)
        if numbers is not None and comparison is not None:
            write_json(numbers, comparison_numbers(comparison))
    except OSError as error:
        raise DataError(f"the comparison cannot be written: {reason(error)}") from error
    write_figures(page.pictures, figures_beside(output), figures)
    return output


def _by_folders(paths: Sequence[Path]) -> list[Chapter]:
    """Shows what differs in configurations that are called by their folders."""
    named = named_runs(paths)
    folders = folder_names([runs[0].path for _, runs in named]) if named else []
    if len(named) < 2 or [name for name, _ in named] != folders:
        return []
    table = what_differs([runs[0] for _, runs in named], folders)
    return [Chapter("recipes", "Recipes", [table])]


def _comparison_lede(comparison: Comparison) -> str:
    runs = sum(len(one.runs) for one in comparison.configurations)
    names = ", ".join(one.name for one in comparison.configurations)
    volumes = len(comparison.reference.volumes)
    return f"{runs} runs of {names}; {volumes} test volumes"
