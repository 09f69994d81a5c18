"""The chapters of a comparison."""

from __future__ import annotations

from hyperslab.report.comparison.configurations import Comparison
from hyperslab.report.comparison.curves import POWERS, loss_curves, loss_in_common
from hyperslab.report.comparison.residuals import residual_distributions, scatters
from hyperslab.report.comparison.tables import comparison_numbers, errors_table, reference_table
from hyperslab.report.figures.scatter import FEWEST
from hyperslab.report.number_format import label
from hyperslab.report.page.blocks import Block, Chapter, Figures, Heading, Paragraph


def comparison_chapters(comparison: Comparison) -> list[Chapter]:
    """The table of all configurations, figure 9 and figure 10."""
    return [
        Chapter("comparison", "All configurations", _tables(comparison)),
        Chapter("figure-9", "Test loss by epoch and by time", _losses(comparison)),
        Chapter("figure-10", "True against predicted", _predictions(comparison)),
    ]


def _tables(comparison: Comparison) -> list[Block]:
    numbers = comparison_numbers(comparison)
    words = (
        f"{numbers['test_volumes']} test volumes, the same for all. A network that sees parts of "
        "volumes predicts once for each part; averaged and recalibrated, its predictions for a "
        "volume are one: their mean, put right by a line for each parameter that is fitted to the "
        "volumes of the validation split. Intervals are by a bootstrap over volumes, drawn "
        "together for all configurations, with the seeds as a second level; with fewer than "
        f"{FEWEST} volumes there are none."
    )
    tables = [errors_table(numbers)]
    if len(numbers["rows"]) > 1:
        tables.append(reference_table(numbers))
    return [Paragraph(words), *tables]


def _losses(comparison: Comparison) -> list[Block]:
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
