"""Comparisons of runs against numbers worked out by hand (tier: no process)."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.errors import DataError
from hyperslab.studies.configurations import MEAN_CONTROL as OF_ALL
from hyperslab.studies.configurations import Comparison, read_comparison
from hyperslab.studies.report import write_comparison
from hyperslab.studies.report.comparison import comparison_numbers, curve_of, loss_curves
from tests.studies.report.compared import (
    EPOCHS,
    MEAN,
    columns,
    write_evaluation,
    write_run,
    write_swept,
)
from tests.studies.report.fake import NAMES, fake_run


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_swept(tmp_path_factory.mktemp("swept") / "figure9")


@pytest.fixture(scope="module")
def ridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("control") / "ridge"
    write_evaluation(folder, noise=0.15, seed=9)
    return folder


@pytest.fixture(scope="module")
def comparison(swept: Path, ridge: Path) -> Comparison:
    return read_comparison([swept], [("ridge", ridge)])


def squares(folder: Path, parts: int) -> NDArray[np.float64]:
    """(V, 4)"""
    file = folder / "evaluation" / "predictions.csv"
    off = columns(file, "predicted") - columns(file, "true")
    return (off**2).reshape(-1, parts, 4).mean(1)


def test_the_ratios_are_those_of_plain_numpy(swept: Path, comparison: Comparison) -> None:
    rows = {row.name: row for row in comparison.rows}
    true = columns(swept / "64/rate-0.001-seed-0/evaluation/predictions.csv", "true")
    prior = ((true - MEAN) ** 2).mean(0)
    for name, parts in (("64", 1), ("16", 8)):
        folders = [swept / name / f"rate-0.001-seed-{seed}" for seed in range(3)]
        errors = np.stack([squares(folder, parts) for folder in folders])
        for i, parameter in enumerate(NAMES):
            found = rows[name].ratios(parameter)
            np.testing.assert_allclose(found, errors[:, :, i].mean(1) / prior[i])
            assert rows[name].ratio(parameter).value == pytest.approx(found.mean())
        np.testing.assert_allclose(rows[name].ratios(OF_ALL), errors.mean((1, 2)) / prior.mean())
    ratio = rows["16"].ratio_to(rows["64"], "sigma_8")
    above, below = (rows[name].error("sigma_8").mean() for name in ("16", "64"))
    assert ratio.value == pytest.approx(above / below)
    assert ratio.lower < ratio.value < ratio.upper


def test_averages_are_recalibrated_on_the_validation_split(
    swept: Path, comparison: Comparison
) -> None:
    averaged = comparison.configurations[2].averaged
    assert averaged is not None
    for seed in range(3):
        folder = swept / "16" / f"rate-0.001-seed-{seed}" / "evaluation"

        def means(file: str, kind: str, at: Path = folder) -> NDArray[np.float64]:
            return columns(at / file, kind).reshape(-1, 8, 4).mean(1)

        for i, name in enumerate(NAMES):
            x, y = (means("validation.csv", kind)[:, i] for kind in ("predicted", "true"))
            slope, intercept = np.polyfit(x, y, 1)
            assert slope > 1.5, "parts that hedge"
            predicted = slope * means("predictions.csv", "predicted")[:, i] + intercept
            off = predicted - means("predictions.csv", "true")[:, i]
            np.testing.assert_allclose(averaged.error(name)[seed], off**2)


def test_the_reference_sees_whole_volumes_and_is_the_best(comparison: Comparison) -> None:
    assert comparison.reference.name == "64 + batch norm"
    assert [row.name for row in comparison.rows] == [
        "64 + batch norm",
        "64",
        "16",
        "16, averaged and recalibrated",
        "ridge",
    ]


def test_only_parts_show_their_running_minimum(comparison: Comparison) -> None:
    for one, parts in zip(comparison.configurations, (False, False, True), strict=True):
        curve = curve_of(one)
        losses = np.stack([run.epochs["test_loss"] for run in one.runs])
        expected = np.minimum.accumulate(losses, 1) if parts else losses
        assert curve.followed
        assert curve.losses.shape == (3, EPOCHS)
        np.testing.assert_array_equal(curve.losses, expected)
        np.testing.assert_array_equal(curve.seconds[1], 61.0 * np.arange(1, EPOCHS + 1))
    assert np.any(np.diff(losses) > 0), "the loss must jump"


@pytest.mark.parametrize(
    ("losses", "label", "power"),
    [
        (("mse", "mse"), "test loss: mean squared error", 2),
        (("l1", "l1"), "test loss: mean absolute error", 1),
        (("mse", "l1"), "test loss", None),
        (("cross_entropy", "cross_entropy"), "test loss: cross-entropy", None),
    ],
)
def test_levels_are_of_the_loss_that_was_trained(
    tmp_path: Path, losses: tuple[str, str], label: str, power: int | None
) -> None:
    for seed, loss in enumerate(losses):
        run = write_run(tmp_path / f"{seed}", seed=seed, noise=0.2)
        recipe = json.loads((run / "recipe.yaml").read_text())
        recipe["model"]["width"] = 32 + seed  # two configurations
        (run / "recipe.yaml").write_text(json.dumps(recipe | {"loss": loss}))
    picture = loss_curves(read_comparison([tmp_path / "0", tmp_path / "1"], []))[0]
    assert f">{label}<" in picture.svg
    true = columns(tmp_path / "0/evaluation/predictions.csv", "true")
    said = re.findall(r"predicting the mean ([\d.]+)\.", picture.alt)
    if power is None:
        assert said == []
    else:
        assert said == [f"{np.mean(np.abs(true - MEAN) ** power):.3f}"]


@pytest.mark.usefixtures("undrawn")
def test_the_page_and_the_numbers(swept: Path, ridge: Path, comparison: Comparison) -> None:
    numbers = swept.parent / "numbers.json"
    options = ["--control", f"ridge={ridge}", "--json", str(numbers)]
    done = CliRunner().invoke(app, ["report", str(swept), *options])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == str(swept / "report.html")
    page = (swept / "report.html").read_text()
    written = json.loads(numbers.read_text())
    assert written == json.loads(json.dumps(comparison_numbers(comparison)))
    assert (written["test_volumes"], written["reference"]) == (40, "64 + batch norm")
    assert "<script" not in page
    assert page.count("<svg") == 2 + 4 * 5 + 4
    assert "Test loss by time" in page
    for row in comparison.rows:
        assert page.count(f'aria-label="{row.name}: predicted against true') == 4
    shown = re.findall(r">([\d.]+)<br>", page)
    value = np.median(comparison.rows[0].ratios("Omega_m"))
    assert f"{value:.3g}" in shown
    assert len(re.findall(r"\bid=\"([^\"]*)\"", page)) == len(
        set(re.findall(r"\bid=\"(.*?)\"", page))
    )


@pytest.mark.usefixtures("undrawn")
def test_coverage_of_those_that_predict_deviations(tmp_path: Path, ridge: Path) -> None:
    run = write_run(tmp_path / "plain", seed=1, noise=0.1)
    sure = tmp_path / "sure"
    write_evaluation(sure, noise=0.2, seed=4, deviation=0.1)
    controls = [("ridge", ridge), ("sure", sure)]
    found = read_comparison([run], controls)
    none, given = (next(r for r in found.rows if r.name == n) for n in ("ridge", "sure"))
    assert none.coverages(0.68) is None
    off = columns(sure / "predictions.csv", "predicted") - columns(sure / "predictions.csv", "true")
    shares = (np.abs(off) <= 0.0994457883).mean(0)
    np.testing.assert_allclose(given.coverages(0.68), [shares])
    page = write_comparison([run], read_comparison([run], controls)).read_text()
    (table,) = re.findall(r"predicted intervals of 68 % / 95 %.*?</table>", page, re.S)
    assert table.count("<tr>") == 2
    assert f"{100 * shares[0]:.3g}" in table


@pytest.mark.usefixtures("undrawn")
def test_runs_that_differ_by_their_seed_are_one_configuration(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / "runs" / f"{width}-{seed}", seed=seed, noise=0.2, width=width)
        for width in (64, 32)
        for seed in (0, 1)
    ]
    found = read_comparison(paths).configurations
    assert [(one.name, len(one.runs)) for one in found] == [
        ("subvolume=64", 2),
        ("subvolume=32", 2),
    ]
    done = CliRunner().invoke(app, ["report", *map(str, paths)])
    assert done.output.strip() == str(tmp_path / "runs" / "comparison.html")
    (one,) = read_comparison(paths[:2]).configurations
    assert one.name == "paper2020"


@pytest.mark.usefixtures("undrawn")
def test_the_page_of_two_runs_compares_them_if_it_can(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "a")
    other = fake_run(tmp_path / "b")
    done = CliRunner().invoke(app, ["report", str(run), str(other)])
    said = f"{run / 'report.html'} (the page of {run}, with {other} beside it)"
    assert done.output.strip() == said
    page = (run / "report.html").read_text()
    assert "All configurations" not in page
    assert "Their errors are not compared" in page
    assert "Losses by epoch" in page
    assert "Losses by time" in page
    shown = page.partition("What differs in their recipes")[2].partition("</table>")[0]
    assert ">data.path</th>" in shown
    assert str(tmp_path / "b" / "universes") in shown
    assert "optimizer" not in shown
    pair = [write_run(tmp_path / name, seed=seed, noise=0.2) for seed, name in enumerate("cd")]
    done = CliRunner().invoke(app, ["report", *map(str, pair)])
    assert done.output.startswith(f"{pair[0] / 'report.html'} (the page of {pair[0]}, ")
    page = (pair[0] / "report.html").read_text()
    assert "All configurations" in page
    assert "Timeline of a step" in page


def test_two_sweeps_of_configurations_of_the_same_names(tmp_path: Path) -> None:
    rows = [{"name": name, "paths": [f"{name}-run"]} for name in ("64", "16")]
    for sweep in ("first", "second"):
        for row in rows:
            write_run(tmp_path / sweep / f"{row['name']}-run", seed=0, noise=0.2)
        (tmp_path / sweep / "sweep.json").write_text(json.dumps({"variants": rows}))
        rows = [*rows[:1], {"name": "8", "paths": ["8-run"]}]
    found = read_comparison([tmp_path / "first", tmp_path / "second"])
    names = ["first: 64", "16", "second: 64", "8"]
    assert [one.name for one in found.configurations] == names


def test_a_row_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    """Of its text as of its numbers."""
    run = write_run(tmp_path / "run", seed=0, noise=0.2, parts=8)
    path = run / "evaluation" / "validation.csv"
    path.write_text(path.read_text().rpartition("\n")[0][:-3])
    (one,) = read_comparison([run]).configurations
    assert one.averaged is not None


@pytest.mark.parametrize(
    "mean",
    [None, [0.1], {}, {NAMES[0]: [0.1]}, dict.fromkeys(NAMES, 10**400), "x", math.nan],
)
def test_an_evaluation_without_means_is_named(tmp_path: Path, mean: object) -> None:
    run = write_run(tmp_path / "run", seed=0, noise=0.2)
    path = run / "evaluation" / "metrics.json"
    said = json.loads(path.read_text()) | {"training_mean": mean}
    said["training_mean"] = dict.fromkeys(NAMES, mean) if mean is math.nan else mean
    path.write_text(json.dumps(said))
    with pytest.raises(DataError, match=r"metrics\.json lacks the mean of a parameter"):
        read_comparison([run])


def with_another_truth(evaluation: Path) -> None:
    """The first volume's first parameter was something else."""
    path = evaluation / "predictions.csv"
    head, first, *rows = path.read_text().splitlines()
    sample, volume, _, *values = first.split(",")
    path.write_text("\n".join([head, ",".join([sample, volume, "0.5", *values]), *rows, ""]))


@pytest.mark.parametrize("seed", range(3))
def test_other_true_values_are_named_by_their_files(tmp_path: Path, seed: int) -> None:
    """Whether the run is the first of its configuration or not."""
    swept = write_swept(tmp_path)
    other = swept / "64" / f"rate-0.001-seed-{seed}" / "evaluation"
    with_another_truth(other)
    words = f"the true values of .*are not those of .*{re.escape(str(other.parent.parent))}/"
    with pytest.raises(DataError, match=words) as caught:
        read_comparison([swept])
    assert f"{other} " in str(caught.value) or f"{other}," in str(caught.value)
    alone = [swept / name / "rate-0.001-seed-0" for name in ("64 + batch norm", "64")]
    with_another_truth(alone[1] / "evaluation")
    with pytest.raises(DataError, match=f"{re.escape(str(alone[1]))}.* are not those of"):
        read_comparison(
            [swept / "64 + batch norm" / "rate-0.001-seed-0"], [("64", alone[1] / "evaluation")]
        )


def test_what_cannot_be_compared_is_named(tmp_path: Path, swept: Path) -> None:
    first = write_run(tmp_path / "first", seed=0, noise=0.2)
    write_evaluation(tmp_path / "fewer", noise=0.2, volumes=30)
    with pytest.raises(DataError, match=r"fewer was measured on other .* than \S+first/evaluation"):
        read_comparison([first], [("fewer", tmp_path / "fewer")])
    with pytest.raises(DataError, match=r"metrics.json is not there.*\n.*evaluate RUN --calibrate"):
        read_comparison([first], [("none", tmp_path / "none")])
    (tmp_path / "classes").mkdir()
    (tmp_path / "classes" / "metrics.json").write_text('{"classes": {"liver": {"dice": 1}}}')
    with pytest.raises(DataError, match="evaluates classes"):
        read_comparison([first], [("classes", tmp_path / "classes")])
    other = write_run(tmp_path / "other", seed=1, noise=0.2)
    write_evaluation(tmp_path / "of others", noise=0.2, volumes=30, seed=1)
    fewer = (tmp_path / "of others" / "predictions.csv").read_text()
    (other / "evaluation" / "predictions.csv").write_text(fewer)
    with pytest.raises(DataError, match=r"those of \S+other/evaluation are not those of \S+first/"):
        read_comparison([first, other])
    (first / "evaluation" / "predictions.csv").unlink()
    with pytest.raises(DataError, match=r"predictions\.csv is not there"):
        read_comparison([first])
    broken = tmp_path / "sweep"
    broken.mkdir()
    (broken / "sweep.json").write_text("[]")
    with pytest.raises(DataError, match=r"sweep\.json is not a table of a sweep"):
        read_comparison([broken])
    for row, words in (
        ({"name": "a", "paths": [None]}, "is not a table"),
        ({"name": "a", "paths": ["a" * 9000]}, "is not the folder"),
    ):
        (broken / "sweep.json").write_text(json.dumps({"variants": [row]}))
        with pytest.raises(DataError, match=f"sweep.* {words}"):
            read_comparison([broken])
    (broken / "sweep.json").write_text('{"variants": []}')
    with pytest.raises(DataError, match="no run is done yet"):
        read_comparison([broken])
    done = CliRunner().invoke(app, ["report", str(swept), "--control", "ridge"])
    assert done.exit_code == 2
    assert "give NAME=FOLDER" in done.output
