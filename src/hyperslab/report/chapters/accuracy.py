"""The chapter on what the network predicts: errors, true against predicted, residuals."""

from __future__ import annotations

from hyperslab.report.chapters.learnt import Ratios, learnt_words, ratios_of
from hyperslab.report.chapters.segmentation import class_scores
from hyperslab.report.figures.learning import reach_of, residuals
from hyperslab.report.figures.scatter import scatter_plot
from hyperslab.report.number_format import DASH, MINUS, UNITS, label, number
from hyperslab.report.page.blocks import (
    Block,
    CellTable,
    Chapter,
    Figures,
    Heading,
    Notice,
    Paragraph,
    TableCell,
    bar,
)
from hyperslab.report.run_folder import Run

NORMALISED = {
    "ratio": "ratio",
    "mse": "MSE",
    "mse_of_mean": "MSE of the mean",
    "mae": "MAE",
    "rmse": "RMSE",
    "bias": "bias",
    "r2": "R²",
    "correlation": "correlation",
}
PHYSICAL = {"mae_physical": "MAE", "rmse_physical": "RMSE", "bias_physical": "bias"}
RELATIVE = {
    "relative_error": "relative error",
    "relative_error_sc18": "by SC18's formula",
    "relative_error_sc18_of_mean": "of the mean",
}
"""Mathuriya et al. 2018, section VII-A, divide by the prediction."""

Errors = dict[str, float | None]


def accuracy(run: Run) -> Chapter:
    """Tables and figures of the evaluation, or how to make it."""
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
    blocks = [*sentence, *_tables(run), *_pictures(run, ratios)]
    return Chapter("accuracy", "Accuracy", blocks)


def _tables(run: Run) -> list[Block]:
    errors = run.errors
    of = run.evaluation
    about = (
        f"{of.get('samples', DASH)} samples of the {of.get('split', 'test')} split, checkpoint "
        f"{of.get('checkpoint', DASH)}. The ratio is the mean squared error over that of always "
        "predicting the mean of the training split: 1 means nothing was learnt, 0 is perfect."
    )
    normalised = CellTable(
        f"Normalised parameters, in [{MINUS}1, 1]",
        ["parameter", *NORMALISED.values()],
        [[_name(name), *(_cell(key, row) for key in NORMALISED)] for name, row in errors.items()],
    )
    physical = CellTable(
        "Physical parameters, each in its own unit",
        ["parameter", *PHYSICAL.values(), *RELATIVE.values()],
        [
            [
                _name(name, unit=True),
                *(_cell(key, row) for key in PHYSICAL),
                *(_percent(key, row) for key in RELATIVE),
            ]
            for name, row in errors.items()
        ],
    )
    return [Paragraph(about), normalised, physical]


def _pictures(run: Run, ratios: Ratios) -> list[Block]:
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


def _name(name: str, *, unit: bool = False) -> TableCell:
    symbol = label(name)
    remark = UNITS.get(name, "") if unit else name if symbol != name else ""
    return TableCell(symbol, f"[{remark}]" if unit and remark else remark)


def _cell(key: str, row: Errors) -> TableCell | str:
    value = row.get(key)
    if key == "ratio" and value is not None:
        return bar(value, number(value))
    return number(value)


def _percent(key: str, row: Errors) -> str:
    value = row.get(key)
    return f"{number(100 * value)} %" if value is not None else number(None)
