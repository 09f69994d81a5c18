"""Formats numbers, sizes and names as a reader wants them, and the one kind of table of studies.

A table is plain values; `Table.for_terminal` and `templates/table.html` of the report lay it out.
Those of the scores of an evaluation are alike for the page of a run and for the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import rich.table
from rich import box
from rich.cells import cell_len
from rich.console import JustifyMethod
from rich.text import Text

from hyperslab.errors import printable
from hyperslab.train.metrics import ConfidenceInterval
from hyperslab.train.uncertainty import LEVELS

LABELS = {"Omega_m": "Ωₘ", "sigma_8": "σ₈", "n_s": "nₛ", "N_spec": "nₛ", "H_0": "H₀"}
UNITS = {"H_0": "km/s/Mpc"}
MINUS = "\N{MINUS SIGN}"
DASH = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
DIGITS = 3  # significant ones
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
SCALES = ("B", "KiB", "MiB", "GiB", "TiB")


def label(name: str) -> str:
    """Returns a parameter's usual symbol; its name where none is known."""
    return LABELS.get(name, name)


def number(value: float | None) -> str:
    """Writes a number to three significant digits; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return DASH
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.{DIGITS - 1}e}".split("e")
        power = str(int(exponent)).translate(SUPERSCRIPTS)
        return f"{mantissa}·10{power}".replace("-", MINUS)
    places = DIGITS - 1 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:.{max(places, 0)}f}".replace("-", MINUS)


def interval_words(found: ConfidenceInterval) -> str:
    """Writes an estimate and its interval: ``0.143 (0.08 – 0.25)``."""
    return f"{number(found.value)} ({number(found.lower)} {DASH} {number(found.upper)})"


def duration(seconds: float) -> str:
    """Writes a time in its two largest units: ``75`` as ``1 min 15 s``."""
    if seconds < 60:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def scale_of(size: float) -> tuple[float, str]:
    """Chooses the unit that suits a size [B]: how many bytes it has, and its name."""
    power = 0 if size < 1 else min(int(math.log(size, 1024)), len(SCALES) - 1)
    return 1024.0**power, SCALES[power]


def size(value: float) -> str:
    """Writes a number of bytes, such as ``1.50 GiB``."""
    scale, unit = scale_of(value)
    return f"{number(value / scale)} {unit}"


def counted(count: int, thing: str) -> str:
    """Counts things: ``1 epoch``, ``2 epochs``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def slug(name: str) -> str:
    """Makes a part of a file's name of any name."""
    return "".join(c if c.isalnum() else "-" for c in name)


def times(values: Iterable[object]) -> str:
    """Joins extents: ``2 x 3 x 4``, with the right sign between."""
    return f" {TIMES} ".join(map(str, values))


@dataclass(frozen=True, slots=True)
class TableCell:
    """Holds a text, a quiet remark beside or ``below`` it, or a bar behind it.

    A ``share`` of 1 fills the cell with the bar.
    """

    text: str
    remark: str = ""
    below: str = ""
    share: float | None = None

    @property
    def percent(self) -> str:
        """Returns how wide the bar is."""
        return f"{100 * min(max(self.share or 0.0, 0.0), 1.0):.1f}"


TableRow = Sequence[TableCell | str]


@dataclass(frozen=True, slots=True)
class Table:
    """Holds a table whose first column names the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[TableRow]

    def for_terminal(
        self,
        *,
        left: Collection[str] = (),
        padding: int = 1,
        wrap: str = "",
        wrap_heads: bool = False,
    ) -> rich.table.Table:
        """Lays the table out for rich's console.

        Columns of the heads ``left`` (by default the first one, and those without a head) begin at
        the left, all others end at the right. In a narrow terminal the column ``wrap`` gives way,
        and with ``wrap_heads`` whatever has more than one word. Numbers are never cut there, so
        the table may be wider than the terminal.
        """
        left = left or ("", self.head[0])
        table = rich.table.Table(
            box=box.SIMPLE_HEAD,
            padding=(0, padding),
            pad_edge=False,
            caption=self.caption or None,
            caption_justify="left",
        )
        # Names come from files: no markup in them, and no control characters.
        rows = [[printable(_plain(cell)) for cell in row] for row in self.rows]
        for place, name in enumerate(self.head):
            justify: JustifyMethod = "left" if name in left else "right"
            fixed = not name or (name != wrap and (justify == "left" or not wrap_heads))
            words = " ".join([name, *(row[place] for row in rows)]).split()
            longest = max(map(cell_len, words), default=0) if wrap_heads else None
            table.add_column(Text(name), justify=justify, no_wrap=fixed, min_width=longest)
        for row in rows:
            table.add_row(*map(Text, row))
        return table


def _plain(cell: TableCell | str) -> str:
    if isinstance(cell, str):
        return cell
    return " ".join(filter(None, (cell.text, cell.remark, cell.below)))


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

SCORES = {
    "dice": "Dice",
    "dice_mean": "mean Dice",
    "iou": "IoU",
    "precision": "precision",
    "recall": "recall",
}
SURFACES = {
    "hausdorff_95_mm": "Hausdorff 95 % [mm]",
    "average_surface_distance_mm": "average [mm]",
    "surface_dice": "surface Dice",
    "samples_both": "samples with both",
    "samples_missed": "missed",
    "samples_invented": "invented",
}
VOXEL_COUNTS = ("true_positives", "false_positives", "false_negatives")
"""Lists the scores that count voxels; all other scores of a class are shown."""

ScoresByName = Mapping[str, Mapping[str, float | None]]
"""Maps each parameter, or class, the background's first, to its scores; None: not defined."""


def number_tables(errors: ScoresByName) -> Iterator[Table]:
    """Lists the errors of predicted numbers, normalised and in their own units."""
    normalised: list[TableRow] = []
    physical: list[TableRow] = []
    for name, row in errors.items():
        title = TableCell(label(name), name if label(name) != name else "")
        normalised.append([title, *(score_cell(key, row, "ratio") for key in NORMALISED_ERRORS)])
        title = TableCell(label(name), f"[{UNITS[name]}]" if name in UNITS else "")
        shares = (_percent(row.get(key)) for key in RELATIVE_ERRORS)
        physical.append([title, *(number(row.get(key)) for key in PHYSICAL_ERRORS), *shares])
    head = ["parameter", *NORMALISED_ERRORS.values()]
    yield Table(f"Normalised parameters, in [{MINUS}1, 1]", head, normalised)
    head = ["parameter", *PHYSICAL_ERRORS.values(), *RELATIVE_ERRORS.values()]
    yield Table("Physical parameters, each in its own unit", head, physical)


JOINT = "all together"


def coverage_table(each: Mapping[str, Mapping[str, Any]], joint: Mapping[str, Any]) -> Table:
    """Tables how often predicted intervals hold the true values, as `RankStatistics.facts` says.

    Those of ``each`` parameter come first, those of all together last.
    """
    rows: list[TableRow] = []
    for name, found in [*each.items(), (JOINT, joint)]:
        cells = []
        for level in LEVELS:
            ends = (number(100 * end) for end in found[f"coverage_{level}_interval"])
            share = f"{number(100 * found[f'coverage_{level}'])} %"
            cells.append(TableCell(share, below=f" {DASH} ".join(ends)))
        tested = (number(found[key]) for key in ("mean_squared_residual", "ks_probability"))
        rows.append([label(name), *cells, *tested])
    head = ["parameter", *(f"in {level} % intervals" for level in LEVELS)]
    caption = "Share of true values in predicted intervals, mean squared residual, probability"
    return Table(f"{caption} of the ranks", [*head, "residual²", "probability"], rows)


def _percent(value: float | None) -> str:
    return number(None) if value is None else f"{number(100 * value)} %"


def class_tables(scores: ScoresByName, evaluation: Mapping[str, Any]) -> Iterator[Table]:
    """Tables the overlap of masks, distances between surfaces, and where voxels went.

    ``evaluation`` is what ``metrics.json`` says besides.
    """
    known = {*SCORES, *SURFACES, *VOXEL_COUNTS}
    further = dict.fromkeys(key for row in scores.values() for key in row if key not in known)
    measured = {**SCORES, **{key: _measure_label(key) for key in further}}
    rows: list[TableRow] = []
    for name, row in scores.items():
        voxels = int(row.get("true_positives") or 0) + int(row.get("false_negatives") or 0)
        rows.append([name, *(score_cell(key, row, "dice") for key in measured), f"{voxels:,}"])
    head = ["class", *measured.values(), "true voxels"]
    yield Table("Overlap of predicted and true masks", head, rows)
    yield from _surfaces(scores, evaluation.get("surfaces"))
    yield from _confusion(list(scores), evaluation.get("confusion", []))


def score_cell(key: str, row: Mapping[str, float | None], barred: str) -> TableCell:
    """Makes a cell of a number, with a bar behind that of the key ``barred``."""
    value = row.get(key)
    return TableCell(number(value), share=value if key == barred else None)


def _measure_label(key: str) -> str:
    """Writes ``mean_surface_distance_mm`` as ``mean surface distance [mm]``."""
    named = f"{key.removesuffix('_mm')} [mm]" if key.endswith("_mm") else key
    return named.replace("_", " ")


def _surfaces(scores: ScoresByName, about: Any) -> Iterator[Table]:
    """Tables distances between surfaces, of the classes that have one."""
    rows: list[TableRow] = [
        [name, *(_count_or_number(key, row.get(key)) for key in SURFACES)]
        for name, row in scores.items()
        if any(key in row for key in SURFACES)
    ]
    within = about.get("tolerance_mm") if isinstance(about, dict) else None
    caption = "Distances between the surfaces of predicted and true masks"
    if isinstance(within, float | int):
        caption += f"; surface Dice: the share within {number(within)} mm"
    if rows:
        yield Table(caption, ["class", *SURFACES.values()], rows)


def _count_or_number(key: str, value: float | None) -> str:
    whole = key.startswith("samples_") and value is not None and value == value // 1
    return f"{value:,.0f}" if whole else number(value)


def _confusion(names: Sequence[str], confusion: Any) -> Iterator[Table]:
    try:
        matrix = np.array(confusion, np.float64)
    except (ValueError, TypeError):  # ragged, or of words
        return
    if matrix.shape != (len(names), len(names)):
        return
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    rows: list[TableRow] = [
        [name, *(TableCell(f"{number(100 * share)} %", share=share) for share in row)]
        for name, row in zip(names, shares.tolist(), strict=True)
    ]
    head = ["true class", *(f"as {name}" for name in names)]
    yield Table("Where the voxels of each class went [% of the true ones]", head, rows)
