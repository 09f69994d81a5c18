"""Writes the chapter on an evaluation: errors of predicted numbers, scores of classes.

In reading order: which parameters were learnt; tables and figures of predicted numbers (true
against predicted, and residuals: Oyama et al. 2020, figure 10); tables of classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hyperslab.errors import DataError
from hyperslab.studies.class_tables import class_tables, score_cell
from hyperslab.studies.configurations import FEWEST_VOLUMES, read_scored
from hyperslab.studies.report.canvas import FIRST, INK, LETTERS, SECOND, Canvas, Picture
from hyperslab.studies.report.html import Block, Chapter, Figures, Heading, Notice
from hyperslab.studies.report.uncertainty import uncertainty_blocks
from hyperslab.studies.run_folder import TEST, Columns, Measures, Run
from hyperslab.studies.table import (
    DASH,
    MINUS,
    UNITS,
    Table,
    TableCell,
    interval_words,
    label,
    number,
    slug,
)
from hyperslab.train.metrics import ConfidenceInterval, FloatArray, fit_calibration

Ratios = Mapping[str, ConfidenceInterval]


def accuracy(run: Run) -> Chapter:
    """Shows tables and figures of the evaluation, or says how to make it."""
    if not run.evaluation:
        notice = Notice(
            "This run has not been evaluated yet. The evaluation predicts the test split, which "
            "the network never saw:",
            f"hyperslab evaluate {run.path}",
        )
        return Chapter("accuracy", "Accuracy", [notice])
    of = run.evaluation
    about = (
        f"{of.get('samples', DASH)} samples of the {run.split} split, checkpoint "
        f"{of.get('checkpoint', DASH)}."
    )
    blocks = _of_classes(run, about) if run.scores else _of_numbers(run, about)
    return Chapter("accuracy", "Accuracy", blocks)


def ratios_of(run: Run) -> Ratios:
    """Computes by parameter the error over that of predicting the training split's mean.

    With 95 % intervals, by a bootstrap over volumes. Empty where the evaluation does not say which
    volumes its samples are of, or what the mean is, and where there are too few, or where they are
    not of the test split: of what it was trained on a network may have learnt nothing but that.
    """
    measured = run.errors and run.split == TEST
    if not measured or not isinstance(run.evaluation.get("training_mean"), dict):
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
        ("Not distinguishable from predicting the mean: ", open_ones),
        ("Worse than predicting the mean: ", worse),
        ("Predicted with values that are not finite: ", none),
    )
    words = [
        f"{start}{', '.join(f'{label(n)} {interval_words(ratios[n])}' for n in names)}."
        for start, names in told
        if names
    ]
    return f"{' '.join(words)} In brackets: 95 % intervals, by a bootstrap over volumes."


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


def _of_numbers(run: Run, about: str) -> list[Block]:
    errors = run.errors
    ratios = ratios_of(run)
    about += (
        " The ratio is the mean squared error over that of always predicting the mean of the "
        "training split: 1 means nothing was learnt, 0 is perfect."
    )
    normalised = Table(
        f"Normalised parameters, in [{MINUS}1, 1]",
        ["parameter", *NORMALISED_ERRORS.values()],
        [
            [
                TableCell(label(name), name if label(name) != name else ""),
                *(score_cell(key, row, "ratio") for key in NORMALISED_ERRORS),
            ]
            for name, row in errors.items()
        ],
    )
    physical = Table(
        "Physical parameters, each in its own unit",
        ["parameter", *PHYSICAL_ERRORS.values(), *RELATIVE_ERRORS.values()],
        [
            [
                TableCell(label(name), f"[{UNITS[name]}]" if name in UNITS else ""),
                *(number(row.get(key)) for key in PHYSICAL_ERRORS),
                *(_percent(row.get(key)) for key in RELATIVE_ERRORS),
            ]
            for name, row in errors.items()
        ],
    )
    words = learnt_words(ratios)
    blocks: list[Block] = [*([words] if words else []), about, normalised, physical]
    if not run.predictions:
        missing = "evaluation/predictions.csv is not there, so predictions cannot be drawn:"
        return [*blocks, Notice(missing, f"hyperslab evaluate {run.path}")]
    # One reach for all parameters, so that a narrow distribution of residuals looks narrow.
    reach = _reach_around(*(_residuals(name, run.predictions) for name in errors))
    scatters = [_scatter(n, run.predictions, errors[n], ratios.get(n)) for n in errors]
    histograms = [_histogram(n, run.predictions, errors[n], reach) for n in errors]
    return [
        *blocks,
        Heading("True against predicted"),
        f"Normalised parameters of the {run.split} split; a point on the dashed line is exact.",
        Figures(scatters, "small"),
        Heading("Residuals"),
        Figures(histograms, "small"),
        *uncertainty_blocks(run),
    ]


def _percent(value: float | None) -> str:
    return number(None) if value is None else f"{number(100 * value)} %"


MOST_BARS = 150  # the most points whose uncertainty is drawn, of those that are drawn
MOST_POINTS = 1000  # the most points that are drawn, an even choice: more only make a page heavy


def evenly(count: int) -> np.ndarray:
    """Chooses at most `MOST_POINTS` indices, evenly spaced, first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(np.int64))


def _residuals(name: str, predictions: Columns) -> FloatArray:
    return predictions[f"predicted_{name}"] - predictions[f"true_{name}"]


def _reach_around(*values: FloatArray) -> float:
    """Finds a limit that holds all values either side of zero."""
    reach = max((float(np.nanmax(np.abs(v), initial=0.0)) for v in values), default=0.0)
    return 1.08 * reach if reach > 0 else 1.0


def _scatter(
    name: str, predictions: Columns, errors: Measures, ratio: ConfidenceInterval | None
) -> Picture:
    """Draws true against predicted, with the band of the straight line through the samples.

    ``ratio``: of the errors to those of the mean.
    """
    canvas = Canvas(f"scatter-{slug(name)}", width=240, height=250)
    true = predictions[f"true_{name}"]
    predicted = predictions[f"predicted_{name}"]
    chosen = evenly(len(true))
    axes = canvas.axes
    canvas.square(max(1.1, _reach_around(true, predicted)))
    band = fitted_band(true, predicted)
    if band is not None:
        axes.fill_between(*band, color=FIRST, alpha=0.18, linewidth=0)
    axes.plot(true[chosen], predicted[chosen], "o", color=FIRST, alpha=0.65, markersize=5, mew=0)
    bars = ""
    if (deviation := predictions.get(f"std_{name}")) is not None:
        few = chosen[:: -(-len(chosen) // MOST_BARS)]
        reach = np.abs(deviation[few])
        axes.errorbar(true[few], predicted[few], reach, fmt="none", ecolor=FIRST, alpha=0.4)
        bars = " Bars: the predicted standard deviation."
    axes.set_title(f"{len(true)} samples", loc="left", fontsize=LETTERS)
    some = "" if len(chosen) == len(true) else f" {len(chosen)} of {len(true)} samples are drawn."
    shaded = "" if band is None else " Band: the straight line through them, 95 %."
    r2 = number(errors.get("r2"))
    correlation = number(errors.get("correlation"))
    of_mean = "" if ratio is None else f"Ratio {interval_words(ratio)}; "
    return canvas.picture(
        title=label(name),
        alt=f"{name}: predicted against true for {len(true)} samples, R squared {r2}, "
        f"correlation {correlation}.",
        caption=f"{of_mean}R² = {r2}, correlation {correlation}.{shaded}{bars}{some}",
    )


DRAWN_LINES = 1000  # the straight lines through samples that a bootstrap draws


def fitted_band(
    true: FloatArray, predicted: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray] | None:
    """Computes where 95 % of the straight lines lie that a bootstrap over samples draws.

    Flat for a network that predicts the mean. Returns places along the true values, and the ends
    of the interval there; None where there are too few samples, or all are alike.
    """
    known = np.isfinite(true) & np.isfinite(predicted)
    x = true[known]
    y = predicted[known]
    if len(x) < FEWEST_VOLUMES or np.ptp(x) == 0:
        return None
    drawn = np.random.default_rng(0).integers(0, len(x), (DRAWN_LINES, len(x)))
    drawn = drawn[np.ptp(x[drawn], axis=1) > 0]  # one of equal true values has no slope
    lines = fit_calibration(x[drawn].T, y[drawn].T)
    places = np.linspace(x.min(), x.max(), 40)
    lower, upper = np.quantile(lines(places[:, None]), [0.025, 0.975], axis=1)
    return places, lower, upper


def _histogram(name: str, predictions: Columns, errors: Measures, reach: float) -> Picture:
    """Draws the distribution of predicted - true, up to ``reach`` on both sides."""
    canvas = Canvas(f"residual-{slug(name)}", width=240, height=190)
    off = _residuals(name, predictions)
    bins = np.linspace(-reach, reach, 2 * int(np.clip(1.5 * np.sqrt(len(off)), 7, 30)) + 2)
    canvas.axes.hist(off, bins=list(bins), color=FIRST, alpha=0.75)
    canvas.axes.axvline(0, color=INK, linewidth=1)
    canvas.axes.axvline(float(off.mean()), color=SECOND, linewidth=2, linestyle="--")
    canvas.axes.set(xlim=(-reach, reach), xlabel=f"predicted {MINUS} true", ylabel="samples")
    canvas.axes.grid(visible=False, axis="x")
    canvas.axes.locator_params(axis="x", nbins=5)
    canvas.whole_ticks("y")
    bias = number(errors.get("bias"))
    rmse = number(errors.get("rmse"))
    return canvas.picture(
        title=label(name),
        alt=f"{name}: histogram of {len(off)} residuals, bias {bias}, "
        f"root mean square error {rmse}.",
        caption=f"Bias {bias} (dashed), RMSE {rmse}.",
    )


def dice_of(scores: Mapping[str, Measures]) -> list[tuple[str, float]]:
    """Lists the Dice of every class but the background."""
    found = [(name, row.get("dice")) for name, row in list(scores.items())[1:]]
    return [(name, dice) for name, dice in found if dice is not None]


def _of_classes(run: Run, about: str) -> list[Block]:
    scores = run.scores
    about += (
        " A score counts the voxels of all samples together; 1 is perfect. The mean Dice averages "
        "over the samples that have the class, with equal weights."
    )
    return [about, *class_tables(scores, run.evaluation)]
