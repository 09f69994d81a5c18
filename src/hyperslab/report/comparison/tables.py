"""The numbers of a comparison: errors over those of the mean and of a reference, with intervals."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from hyperslab.metrics.bootstrap import CONFIDENCE, ConfidenceInterval
from hyperslab.report.comparison.configurations import Comparison
from hyperslab.report.comparison.scored import MEAN
from hyperslab.report.figures.scatter import FEWEST
from hyperslab.report.number_format import DASH, label, number
from hyperslab.report.page.blocks import CellTable, TableCell, TableRow


def comparison_numbers(comparison: Comparison) -> dict[str, Any]:
    """All numbers as plain values, for JSON: what the tables show is read from here."""
    reference = comparison.reference
    keys = (MEAN, *comparison.parameters)
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


def errors_table(numbers: dict[str, Any]) -> CellTable:
    """Mean squared error over that of predicting the mean: median over seeds, interval."""
    keys = (MEAN, *numbers["parameters"])
    few = numbers["test_volumes"] < FEWEST
    rows: list[TableRow] = [
        [
            TableCell(row["name"], below=_seeds(row)),
            *(
                _cell(float(np.median(row["ratio_by_seed"][key])), row["ratio"][key], few)
                for key in keys
            ),
        ]
        for row in numbers["rows"]
    ]
    rows.append(["predicting the mean", *["1"] * len(keys)])
    return CellTable(
        "Mean squared error over that of predicting the mean: median over seeds, and the 95 % "
        "interval of the mean over seeds",
        ["configuration", "mean", *map(label, numbers["parameters"])],
        rows,
    )


def reference_table(numbers: dict[str, Any]) -> CellTable:
    """How many times the error of the reference the others have."""
    keys = (MEAN, *numbers["parameters"])
    rows = []
    for row in numbers["rows"]:
        found = [row["to_reference"][key] for key in keys]
        if found[0] is None:
            continue
        cells = [_cell(one["value"], one, numbers["test_volumes"] < FEWEST) for one in found]
        rows.append([row["name"], *cells])
    return CellTable(
        f"Mean squared error over that of {numbers['reference']}, and its 95 % interval",
        ["configuration", "mean", *map(label, numbers["parameters"])],
        rows,
    )


def _cell(value: float, interval: dict[str, float], few: bool) -> TableCell:
    """A number and its interval, of which ``few`` volumes say nothing."""
    if few:
        return TableCell(number(value))
    found = ConfidenceInterval(**interval)
    ends = f"{number(found.lower)} {DASH} {number(found.upper)}"
    return TableCell(number(value), below=ends)


def _seeds(row: dict[str, Any]) -> str:
    seeds = f"{row['seeds']} seeds" if row["seeds"] > 1 else "1 seed"
    return "control" if row["control"] else f"{seeds}, {row['samples']} test samples"
