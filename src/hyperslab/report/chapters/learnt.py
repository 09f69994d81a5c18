"""Which parameters a network has learnt: its errors against those of predicting the mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hyperslab.errors import DataError
from hyperslab.metrics.bootstrap import ConfidenceInterval
from hyperslab.report.comparison.scored import read_scored
from hyperslab.report.figures.scatter import FEWEST
from hyperslab.report.number_format import interval_words, label
from hyperslab.report.run_folder import Run

Ratios = Mapping[str, ConfidenceInterval]


def ratios_of(run: Run) -> Ratios:
    """By parameter, the error over that of predicting the mean of the training split.

    With 95 % intervals, by a bootstrap over volumes. Empty where the evaluation does not say which
    volumes its samples are of, or what the mean is, and where there are too few.
    """
    if not run.errors or not isinstance(run.evaluation.get("training_mean"), dict):
        return {}
    try:
        scored, _ = read_scored(run.path.name, [run.path / "evaluation"])
    except DataError:  # evaluated by an earlier version
        return {}
    if len(scored.volumes) < FEWEST:
        return {}
    return {name: scored.ratio(name) for name in scored.parameters}


def learnt(ratios: Ratios) -> list[str]:
    """The parameters whose whole interval is better than predicting the mean."""
    return [name for name, ratio in ratios.items() if ratio.upper < 1]


def learnt_words(ratios: Ratios) -> str:
    """What was learnt and what was not, in a sentence each; empty where nothing can be said."""
    if not ratios:
        return ""
    better = learnt(ratios)
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
