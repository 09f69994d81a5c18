"""The page shows predicted uncertainties and how they are calibrated (tier: no process)."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hyperslab.errors import DataError
from hyperslab.studies.report import write_report
from hyperslab.studies.report.accuracy import uncertainty_blocks
from hyperslab.studies.report.canvas import SERIES, series_style
from hyperslab.studies.report.html import Figures
from hyperslab.studies.run_folder import read_run
from hyperslab.studies.table import DASH, JOINT, MINUS, Table, coverage_table
from tests.studies.report.fake import NAMES, fake_run, write_csv


def uncertain_run(folder: Path, *, width: float = 1.0, parts: int = 1) -> Path:
    """A run whose residuals have a deviation that is predicted ``width`` times as large."""
    run = fake_run(folder)
    path = run / "evaluation" / "predictions.csv"
    with path.open() as file:
        head, *rows = csv.reader(file)
    values = np.array([row[1:] for row in rows], float)
    true, predicted = (values[:, [head.index(f"{kind}_{n}") - 1 for n in NAMES]]
                       for kind in ("true", "predicted"))  # fmt: skip
    off = predicted - true
    covariance = width**2 * off.T @ off / len(off)
    deviation = np.sqrt(np.diag(covariance))
    more = [*deviation, *(covariance[i, j] for i in range(4) for j in range(i))]
    further = [f"std_{n}" for n in NAMES]
    further += [f"covariance_{n}_{other}" for i, n in enumerate(NAMES) for other in NAMES[:i]]
    write_csv(
        path,
        [head[0], "volume", *head[1:], *further],
        [[row[0], f"v{i // parts}", *row[1:], *more] for i, row in enumerate(rows)],
    )
    return run


def test_a_page_has_bars_coverage_and_ranks(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run = uncertain_run(tmp_path)
    assert uncertainty_blocks(read_run(run)), "drawn"
    request.getfixturevalue("undrawn")
    page = write_report(run).read_text()
    plain = write_report(fake_run(tmp_path / "plain")).read_text()
    assert page.count("<figure>") == plain.count("<figure>") + 1 + len(NAMES)
    for words in ("Coverage of predicted intervals", "Bars: the predicted standard", "underconf"):
        assert words in page
        assert words not in plain


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("width", "covered"), [(1.0, True), (0.4, False)])
def test_the_table_tells_the_overconfident_from_the_calibrated(
    tmp_path: Path, width: float, covered: bool
) -> None:
    page = write_report(uncertain_run(tmp_path, width=width)).read_text()
    (table,) = re.findall(r"Share of true values in predicted intervals.*?</table>", page, re.S)
    rows = re.findall(r"<tr>.*?</tr>", table, re.S)[1:]
    assert len(rows) == len(NAMES) + 1
    for row in rows:
        lower, upper = map(float, re.findall(rf"([\d.]+) {DASH} ([\d.]+)", row)[0])
        assert (lower < 68 < upper) == covered
    assert float(re.findall(r"<td>([\d.]+)</td>", rows[0])[0]) == pytest.approx(width**-2, rel=0.01)


@pytest.mark.usefixtures("undrawn")
def test_parts_of_volumes_widen_bands_and_are_counted(tmp_path: Path) -> None:
    blocks = uncertainty_blocks(read_run(uncertain_run(tmp_path, parts=8)))
    assert "Shares of 8 volumes" in str(blocks[1])
    figures = [block for block in blocks if isinstance(block, Figures)]
    assert "histogram of 64 ranks in 4 bins" in figures[1].pictures[0].alt


@pytest.mark.usefixtures("undrawn")
def test_broken_tables(tmp_path: Path) -> None:
    run = uncertain_run(tmp_path)
    path = run / "evaluation" / "predictions.csv"
    head, first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([head, ",".join(first.split(",")[:-10] + [""] * 10), *rest, ""]))
    assert "all together" in write_report(run).read_text()
    path.write_text(path.read_text().replace(",volume,", ",other,").replace(",v", ","))
    with pytest.raises(DataError, match=r"predictions\.csv has no column volume"):
        write_report(run)


def test_a_parameter_may_be_called_as_all_of_them_are() -> None:
    def facts(share: float) -> dict[str, object]:
        ends = {f"coverage_{level}_interval": (0.0, 1.0) for level in (68, 95)}
        shares = {"coverage_68": share, "coverage_95": share}
        return {**shares, **ends, "mean_squared_residual": 1.0, "ks_probability": 0.5}

    rows = coverage_table({JOINT: facts(0.25), "H_0": facts(0.5)}, facts(0.75)).rows
    assert [row[0] for row in rows] == [JOINT, "H₀", JOINT]
    assert [getattr(row[1], "text", "") for row in rows] == ["25.0 %", "50.0 %", "75.0 %"]


def test_curves_beyond_the_colours_differ_in_their_lines() -> None:
    styles = [str(series_style(place)) for place in range(2 * len(SERIES))]
    assert len(set(styles)) == len(styles)


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_narrow_terminal_cuts_no_number(width: int) -> None:
    """Without its power of ten a number is another one."""
    small = f"{MINUS}1.23·10⁻⁵"
    table = Table("", ["parameter", "MSE of the mean", "R²"], [["a_long_name", small, small]])
    console = Console(width=width, soft_wrap=True)
    with console.capture() as captured:
        console.print(table.for_terminal(padding=0, wrap_heads=True))
    assert captured.get().count(small) == 2
