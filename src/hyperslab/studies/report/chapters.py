"""Writes the chapters of a run's page on learning, speed and provenance, and its key numbers.

Each chapter is a function that takes the run; where something is missing the chapter says which
command makes it. Those on volumes and on timelines have modules of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

from hyperslab.errors import DataError
from hyperslab.studies.number_format import (
    DASH,
    MINUS,
    UNITS,
    counted,
    duration,
    interval_words,
    label,
    number,
    size,
    times,
)
from hyperslab.studies.report import plots
from hyperslab.studies.report.configurations import read_scored
from hyperslab.studies.report.html import (
    Block,
    Chapter,
    Details,
    FactList,
    Figures,
    Heading,
    Notice,
    Paragraph,
    Tile,
)
from hyperslab.studies.report.plots import (
    FEWEST_VOLUMES,
    LOSS_NAMES,
    dice_by_epoch,
    loss_by_epoch,
    loss_by_step,
    reach_of,
    residuals,
    scatter_plot,
)
from hyperslab.studies.report.segmentation import class_scores, dice_of
from hyperslab.studies.run_folder import Run
from hyperslab.studies.table import Table, TableCell, TableRow, bar_cell
from hyperslab.train.history import CHANGES
from hyperslab.train.metrics import ConfidenceInterval
from hyperslab.util.atomic_files import read_json_lines

Ratios = Mapping[str, ConfidenceInterval]


def ratios_of(run: Run) -> Ratios:
    """Computes by parameter the error over that of predicting the training split's mean.

    With 95 % intervals, by a bootstrap over volumes. Empty where the evaluation does not say which
    volumes its samples are of, or what the mean is, and where there are too few.
    """
    if not run.errors or not isinstance(run.evaluation.get("training_mean"), dict):
        return {}
    try:
        scored, _ = read_scored(run.path.name, [run.path / "evaluation"])
    except DataError:  # evaluated by an earlier version
        return {}
    if len(scored.volumes) < FEWEST_VOLUMES:
        return {}
    return {name: scored.ratio(name) for name in scored.parameters}


def learnt_parameters(ratios: Ratios) -> list[str]:
    """Lists the parameters whose whole interval is better than predicting the mean."""
    return [name for name, ratio in ratios.items() if ratio.upper < 1]


def learnt_words(ratios: Ratios) -> str:
    """Says what was learnt and what was not; empty where nothing can be said."""
    if not ratios:
        return ""
    better = learnt_parameters(ratios)
    worse = [name for name, ratio in ratios.items() if ratio.lower > 1]
    none = [name for name, ratio in ratios.items() if not math.isfinite(ratio.value)]
    open_ones = [name for name in ratios if name not in (*better, *worse, *none)]
    told = (
        ("Learnt, with less error than predicting the mean: ", better),
        ("Not told apart from predicting the mean: ", open_ones),
        ("Worse than predicting the mean: ", worse),
        ("Predicted by what is no finite number: ", none),
    )
    words = [f"{start}{_each(names, ratios)}." for start, names in told if names]
    return f"{' '.join(words)} In brackets: 95 % intervals, by a bootstrap over volumes."


def _each(names: Sequence[str], ratios: Ratios) -> str:
    return ", ".join(f"{label(name)} {interval_words(ratios[name])}" for name in names)


NORMALISED_ERRORS = {
    "ratio": "ratio",
    "mse": "MSE",
    "mse_of_mean": "MSE of the mean",
    "mae": "MAE",
    "rmse": "RMSE",
    "bias": "bias",
    "r2": "R²",
    "correlation": "correlation",
}
PHYSICAL_ERRORS = {"mae_physical": "MAE", "rmse_physical": "RMSE", "bias_physical": "bias"}
RELATIVE_ERRORS = {
    "relative_error": "relative error",
    "relative_error_sc18": "by SC18's formula",
    "relative_error_sc18_of_mean": "of the mean",
}
"""Heads the relative errors; Mathuriya et al. 2018, section VII-A, divide by the prediction."""

Errors = dict[str, float | None]


def accuracy(run: Run) -> Chapter:
    """Shows tables and figures of the evaluation, or says how to make it."""
    if not run.evaluation:
        notice = Notice(
            "This run has not been evaluated yet. The evaluation predicts the test split, which "
            "the network never saw:",
            f"hyperslab evaluate {run.path}",
        )
        return Chapter("accuracy", "Accuracy", [notice])
    if run.scores:
        return class_scores(run)
    ratios = ratios_of(run)
    words = learnt_words(ratios)
    sentence = [Paragraph(words)] if words else []
    blocks = [*sentence, *_error_tables(run), *_prediction_figures(run, ratios)]
    return Chapter("accuracy", "Accuracy", blocks)


def _error_tables(run: Run) -> list[Block]:
    errors = run.errors
    of = run.evaluation
    about = (
        f"{of.get('samples', DASH)} samples of the {of.get('split', 'test')} split, checkpoint "
        f"{of.get('checkpoint', DASH)}. The ratio is the mean squared error over that of always "
        "predicting the mean of the training split: 1 means nothing was learnt, 0 is perfect."
    )
    normalised = Table(
        f"Normalised parameters, in [{MINUS}1, 1]",
        ["parameter", *NORMALISED_ERRORS.values()],
        [
            [_name_cell(name), *(_error_cell(key, row) for key in NORMALISED_ERRORS)]
            for name, row in errors.items()
        ],
    )
    physical = Table(
        "Physical parameters, each in its own unit",
        ["parameter", *PHYSICAL_ERRORS.values(), *RELATIVE_ERRORS.values()],
        [
            [
                _name_cell(name, unit=True),
                *(_error_cell(key, row) for key in PHYSICAL_ERRORS),
                *(_percent(key, row) for key in RELATIVE_ERRORS),
            ]
            for name, row in errors.items()
        ],
    )
    return [Paragraph(about), normalised, physical]


def _prediction_figures(run: Run, ratios: Ratios) -> list[Block]:
    errors = run.errors
    if not run.predictions:
        return [
            Notice(
                "evaluation/predictions.csv is not there, so predictions cannot be drawn:",
                f"hyperslab evaluate {run.path}",
            )
        ]
    reach = reach_of(errors, run.predictions)
    return [
        Heading("True against predicted"),
        Paragraph(
            "Normalised parameters of the test samples; a point on the dashed line is exact."
        ),
        Figures(
            [scatter_plot(n, run.predictions, errors[n], ratios.get(n)) for n in errors], "small"
        ),
        Heading("Residuals"),
        Figures([residuals(n, run.predictions, errors[n], reach=reach) for n in errors], "small"),
    ]


def _name_cell(name: str, *, unit: bool = False) -> TableCell:
    symbol = label(name)
    remark = UNITS.get(name, "") if unit else name if symbol != name else ""
    return TableCell(symbol, f"[{remark}]" if unit and remark else remark)


def _error_cell(key: str, row: Errors) -> TableCell | str:
    value = row.get(key)
    if key == "ratio" and value is not None:
        return bar_cell(value, number(value))
    return number(value)


def _percent(key: str, row: Errors) -> str:
    value = row.get(key)
    return f"{number(100 * value)} %" if value is not None else number(None)


def losses(run: Run) -> Chapter:
    """Shows loss curves, and says what is left to train."""
    blocks: list[Block] = []
    wanted = run.epochs_wanted
    done = len(run.epochs.get("epoch", ()))
    if wanted is not None and done < wanted:
        blocks.append(
            Notice(
                f"This run is not finished: {done} of {wanted} epochs are done. To go on:",
                f"hyperslab train {run.path / 'recipe.yaml'} --resume --output {run.path}",
            )
        )
    blocks += _not_finite(run)
    pictures = []
    measure = LOSS_NAMES.get(str(run.setting("loss")), "loss")
    if run.epochs:
        pictures.append(loss_by_epoch(run.epochs, measure=measure, of_mean=_loss_of_mean(run)))
        pictures += dice_by_epoch(run)
    if run.steps:
        pictures.append(loss_by_step(run.steps, measure=measure))
    blocks.append(Figures(pictures) if pictures else Paragraph("No step is done yet."))
    return Chapter("losses", "Losses", blocks)


def _not_finite(run: Run) -> list[Block]:
    """Warns about losses that are NaN or infinite, which figures leave out."""
    found: list[Block] = []
    for table, column, what in (
        (run.steps, "step", "loss"),
        (run.epochs, "epoch", "train_loss"),
    ):
        bad = np.flatnonzero(~np.isfinite(table.get(what, np.array([]))))
        if not len(bad):
            continue
        first = int(table[column][bad[0]]) + (column == "epoch")
        found.append(
            Notice(
                f"The training loss of {len(bad)} of {counted(len(table[column]), column)} is not "
                f"a finite number, first in {column} {first}; the figures leave them out."
            )
        )
    return found


def _loss_of_mean(run: Run) -> float | None:
    """Returns the squared error of predicting the mean, where the loss is one too."""
    found = [row.get("mse_of_mean") for row in run.errors.values()]
    values = [value for value in found if value is not None]
    return float(np.mean(values)) if values and run.setting("loss") == "mse" else None


def speed(run: Run) -> Chapter:
    """Shows throughput, memory and waiting by step."""
    if not run.steps:
        nothing = Paragraph("No step is done yet, so nothing has been measured.")
        return Chapter("speed", "Speed and memory", [nothing])
    pictures = [plots.throughput_by_step(run.steps)]
    if np.isfinite(run.steps.get("memory_bytes", np.array([]))).any():
        pictures.append(plots.memory_by_step(run.steps))
    if np.isfinite(run.steps.get("flops_per_second", np.array([]))).any():
        pictures.append(plots.flops_by_step(run.steps))
    pictures.append(plots.waiting_by_step(run.steps))
    return Chapter("speed", "Speed and memory", [Figures(pictures, "medium")])


Fact = tuple[str, str]
SETTINGS = {
    "model": "model.name",
    "variant": "model.variant",
    "channels": "model.channels",
    "levels": "model.levels",
    "batch norm": "model.batch_norm",
    "loss": "loss",
    "batch size": "data.batch_size",
    "optimizer": "optimizer.name",
    "learning rate": "optimizer.learning_rate",
    "precision": "precision",
    "device": "device",
    "seed": "seed",
}
CALLED = {"model.name": "model", "optimizer.name": "optimizer", "loss": "loss"}
"""Lists settings that may be targets, by the section that says so."""


def lede(run: Run) -> str:
    """Sums the run up in one sentence."""
    grid = times(f"{axis} {n}" for axis, n in run.grid.items() if n > 1)
    ranks = int(np.prod(list(run.grid.values()) or [1]))
    parts = [
        " ".join(str(k) for k in (run.called("model"), run.setting("model.variant")) if k),
        f"{ranks} ranks: {grid}" if ranks > 1 else "one rank",
        counted(len(run.epochs.get("epoch", ())), "epoch"),
    ]
    return " · ".join(part for part in parts if part)


def key_numbers(run: Run) -> list[Tile]:
    """Lists the numbers one looks for first; those that are not there yet are left out."""
    return [Tile(*words) for words in (*_learnt_tiles(run), *_measured_tiles(run))]


def facts_of(run: Run) -> list[Fact]:
    """Lists everything that says where the numbers come from."""
    found = [
        (what, run.called(CALLED[key]) if key in CALLED else run.setting(key))
        for what, key in SETTINGS.items()
    ]
    found.insert(list(SETTINGS).index("loss") + 1, ("data", run.data))
    found += [("grid", times(f"{axis} {n}" for axis, n in run.grid.items()))]
    if run.started is not None:
        found.append(("training started", f"{run.started:%Y-%m-%d %H:%M} UTC"))
    if run.epochs:
        found.append(("training took", duration(float(np.nansum(run.epochs["seconds"])))))
    found += _evaluation_facts(run)
    return [(what, _fact_words(value)) for what, value in found if value is not None]


def _fact_words(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _evaluation_facts(run: Run) -> list[tuple[str, object]]:
    of = run.evaluation
    weights = of.get("weights")
    seconds = of.get("seconds")
    versions = of.get("versions")
    named = versions.items() if isinstance(versions, dict) else ()
    return [
        ("weights", f"{weights:,}" if isinstance(weights, int) else None),
        ("evaluated", str(of["date"])[:16].replace("T", " ") + " UTC" if "date" in of else None),
        ("evaluation took", duration(seconds) if isinstance(seconds, float) else None),
        ("evaluated on", of.get("device")),
        ("versions", ", ".join(f"{k} {v}" for k, v in named) or None),
    ]


def _learnt_tiles(run: Run) -> list[tuple[str, str, str]]:
    found = [
        (f"Dice: {name}", number(dice), "of the test voxels") for name, dice in dice_of(run.scores)
    ]
    if ratios := ratios_of(run):
        names = learnt_parameters(ratios)
        which = ", ".join(map(label, names)) or "none"
        remark = f"{which}: less error than the mean, 95 %"
        found.append(("Learnt", f"{len(names)} of {len(ratios)}", remark))
    loss = run.epochs.get("validation_loss", np.array([]))
    if np.isfinite(loss).any():
        at = int(np.nanargmin(loss))
        found.append(
            ("Best validation loss", number(loss[at]), f"epoch {run.epochs['epoch'][at] + 1:.0f}")
        )
    return found


def _measured_tiles(run: Run) -> list[tuple[str, str, str]]:
    if not run.steps:
        return []
    rate = float(np.nanmedian(run.steps["samples_per_second"]))
    found = [("Throughput", number(rate), "samples/s, median")]
    memory = run.steps.get("memory_bytes", np.array([]))
    if np.isfinite(memory).any():
        found.append(("Peak memory", size(float(np.nanmax(memory))), "of any one rank"))
    waited = number(100 * plots.waiting_share(run.steps))
    found.append(("Waiting for data", f"{waited} %", "of all step time"))
    if run.epochs:
        total = float(np.nansum(run.epochs["seconds"]))
        found.append(("Training time", duration(total), counted(len(run.epochs["epoch"]), "epoch")))
    return found


def provenance(run: Run) -> Chapter:
    """Shows what was run, on what, and the whole recipe."""
    recipe = yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)
    blocks: list[Block] = [FactList(facts_of(run)), *_changes(run)]
    return Chapter("run", "The run", [*blocks, Details("The whole recipe", recipe)])


def _changes(run: Run) -> list[Block]:
    """Shows how the recipe changed when the run was resumed."""
    path = run.path / CHANGES
    if not path.exists():
        return []
    rows = list(_change_rows(path))
    caption = "What was changed when the run was resumed; the recipe is that of the last steps"
    head = ["key", "before", "from then on", "after step", "date [UTC]"]
    return [Table(caption, head, rows)] if rows else []


def _change_rows(path: Path) -> Iterator[TableRow]:
    """Makes a row for each key that was changed.

    Raises:
        DataError: it is no such file.
    """
    try:
        found, _ = read_json_lines(path)
        for one in found:
            date = str(one["date"])[:16].replace("T", " ")
            for key, (before, now) in one["changes"].items():
                yield [
                    str(key),
                    _setting_words(before),
                    _setting_words(now),
                    str(one["step"]),
                    date,
                ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} holds no changes of a recipe: {error!r}") from None


def _setting_words(value: object) -> str:
    return DASH if value is None else str(value)
