"""Writes the chapter on an evaluation: errors of predicted numbers, scores of classes.

In reading order: which parameters were learnt; tables and figures of predicted numbers (true
against predicted, and residuals: Oyama et al. 2020, figure 10); how well predicted uncertainties
are calibrated, by coverage and by the ranks of true values; tables of classes.

Bands of calibration hold 95 % of what calibrated predictions give, each place by itself. They count
volumes and not their parts; `hyperslab.train.uncertainty` says what ranks and levels are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from shlex import quote

import numpy as np

from hyperslab.errors import DataError
from hyperslab.studies import table
from hyperslab.studies.configurations import FEWEST_VOLUMES, predictions_of_table, read_scored
from hyperslab.studies.report.canvas import (
    FIRST,
    INK,
    LETTERS,
    MUTED,
    SECOND,
    Canvas,
    Picture,
    series_style,
)
from hyperslab.studies.report.html import Block, Chapter, Figures, Heading, Notice
from hyperslab.studies.run_folder import TEST, Columns, Measures, Run
from hyperslab.studies.table import DASH, MINUS, interval_words, label, number, slug
from hyperslab.train.metrics import ConfidenceInterval, FloatArray, fit_calibration
from hyperslab.train.uncertainty import RankStatistics, binomial_band, rank_statistics

Ratios = Mapping[str, ConfidenceInterval]


def accuracy(run: Run) -> Chapter:
    """Shows tables and figures of the evaluation, or says how to make it."""
    if not run.evaluation:
        notice = Notice(
            "This run has not been evaluated yet. The evaluation predicts the test split, which "
            "the network never saw:",
            f"hyperslab evaluate {quote(str(run.path))}",
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


def _of_numbers(run: Run, about: str) -> list[Block]:
    errors = run.errors
    ratios = ratios_of(run)
    about += (
        " The ratio is the mean squared error over that of always predicting the mean of the "
        "training split: 1 means nothing was learnt, 0 is perfect."
    )
    words = learnt_words(ratios)
    blocks: list[Block] = [*([words] if words else []), about, *table.number_tables(errors)]
    if not run.predictions:
        missing = "evaluation/predictions.csv is not there, so predictions cannot be drawn:"
        return [*blocks, Notice(missing, f"hyperslab evaluate {quote(str(run.path))}")]
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
    return [
        Heading("Predicted uncertainties"),
        f"Shares of {volumes} volumes, with 95 % intervals. Residuals are divided by the predicted "
        "standard deviation: a mean square above 1 is overconfident. The probability is that of "
        "ranks as far from uniform as these, or farther, if predictions are calibrated "
        "(Kolmogorov and Smirnov).",
        table.coverage_table(
            {name: one.facts(volumes) for name, one in each.items()}, joint.facts(volumes)
        ),
        Figures([_coverage(each, joint, volumes)]),
        Heading("Ranks of the true values"),
        Figures([_ranks(name, one, volumes) for name, one in each.items()], "small"),
    ]


def _coverage(each: Mapping[str, RankStatistics], joint: RankStatistics, volumes: int) -> Picture:
    """Draws the share of true values inside intervals of each level, with the binomial band."""
    canvas = Canvas("coverage", height=380)
    level = np.linspace(0, 1, 101)
    canvas.axes.fill_between(level, *binomial_band(level, volumes), color=MUTED, alpha=0.25, lw=0)
    canvas.axes.plot(level, level, color=MUTED, linewidth=1)
    told = []
    for place, (name, one) in enumerate([*each.items(), (table.JOINT, joint)]):
        shares = one.coverage(level)
        style = {"color": INK, "linestyle": "-"} if one is joint else series_style(place)
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
    return [about, *table.class_tables(scores, run.evaluation)]
