"""Runs that failed, have just begun, or are alike, alone and compared (tier: no process)."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperslab.errors import DataError
from hyperslab.studies.configurations import read_comparison
from hyperslab.studies.report import write_comparison, write_report
from hyperslab.studies.report.accuracy import learnt_words
from hyperslab.studies.report.chapters import losses
from hyperslab.studies.report.comparison import loss_curves
from hyperslab.studies.report.html import Figures
from hyperslab.studies.run_folder import read_run
from hyperslab.train.history import record_changes
from hyperslab.train.metrics import ConfidenceInterval
from tests.studies.report import fake_scans
from tests.studies.report.compared import write_evaluation, write_run
from tests.studies.report.fake import fake_run


def changed(run: Path, **settings: Any) -> Path:
    recipe = json.loads((run / "recipe.yaml").read_text())
    (run / "recipe.yaml").write_text(json.dumps(recipe | settings))
    return run


def rows(path: Path) -> list[str]:
    return path.read_text().splitlines()


def drawn_losses(run: Path) -> str:
    """The figures of losses alone: a whole page takes seconds to draw."""
    (figures,) = (block for block in losses(read_run(run)).blocks if isinstance(block, Figures))
    return "".join(picture.svg for picture in figures.pictures)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "change", [("width: 1", "width: 999999999999"), ('scans"', f'{"x" * 5000}"')]
)
def test_recipes_of_many_ranks_and_of_names_that_no_system_takes(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    run = fake_scans.fake_run(tmp_path, epochs=3)
    text = (run / "recipe.yaml").read_text()
    assert change[0] in text
    (run / "recipe.yaml").write_text(text.replace(*change))
    page = write_report(run).read_text()
    assert ("is not a folder of volumes now" in page) == (change[0] != "width: 1")


@pytest.mark.usefixtures("undrawn")
def test_a_loss_that_is_no_number_is_told(tmp_path: Path) -> None:
    run = fake_run(tmp_path, epochs=3, wanted=3)
    head, *steps = rows(run / "steps.csv")
    cells = [step.split(",") for step in steps]
    for at in (11, 20):
        cells[at][2] = "nan" if at == 11 else "inf"
    (run / "steps.csv").write_text("\n".join([head, *map(",".join, cells), ""]))
    head, *epochs = rows(run / "epochs.csv")
    first, _, *rest = epochs[1].split(",")
    epochs[1] = ",".join([first, "nan", *rest])
    (run / "epochs.csv").write_text("\n".join([head, *epochs, ""]))
    page = write_report(run).read_text()
    assert "training loss of 2 of 30 steps is not a finite number, first in step 12" in page
    assert "training loss of 1 of 3 epochs is not a finite number, first in epoch 2" in page
    other = write_report(fake_run(tmp_path / "good", epochs=3, wanted=3)).read_text()
    assert "finite" not in other


def test_one_epoch_is_one_epoch_and_ticks_are_whole(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = fake_run(tmp_path, epochs=1, wanted=1)
    shown = drawn_losses(run)
    request.getfixturevalue("undrawn")
    page = write_report(run).read_text()
    assert "1 epochs" not in page
    assert "· 1 epoch" in page
    figure = shown.partition("Training and validation loss over 1 epoch;")[2].partition("</svg>")[0]
    ticks = re.findall(r">([\d.]+)</text>", figure.partition(">epoch</text>")[0])
    assert [tick for tick in ticks if float(tick) > 0.6] == ["1"]


def test_without_validation_there_is_no_curve_of_it(tmp_path: Path) -> None:
    run = fake_run(tmp_path, epochs=3, wanted=3)
    assert ">validation</text>" in drawn_losses(run)
    head, *epochs = rows(run / "epochs.csv")
    blank = [",".join([*row.split(",")[:2], "", "", row.split(",")[4]]) for row in epochs]
    (run / "epochs.csv").write_text("\n".join([head, *blank, ""]))
    assert ">validation</text>" not in drawn_losses(run)


@pytest.mark.usefixtures("undrawn")
def test_own_data_are_shown_by_the_recipes_keys(tmp_path: Path) -> None:
    run = fake_run(tmp_path, epochs=1, wanted=1)
    data = tmp_path / "own"
    data.mkdir()
    for number in range(2):
        np.save(data / f"sim_{number}.npy", np.full((8, 8, 8), number + 1, np.float32))
    (data / "params.txt").write_text("# Omega_m\n0.1\n0.2\n")
    recipe = (run / "recipe.yaml").read_text()
    own = f'data: {{path: "{data}", batch_size: 1, table: params.txt, files: ["sim_*"]}}'
    (run / "recipe.yaml").write_text(re.sub(r"data: \{path.*", own, recipe))
    page = write_report(run).read_text()
    assert "No universe of this run can be shown" not in page
    assert "sim_0, log(1 + value)" in page


@pytest.mark.usefixtures("undrawn")
def test_volumes_of_lists_are_told_as_such(tmp_path: Path) -> None:
    run = fake_run(tmp_path, epochs=1, wanted=1)
    recipe = (run / "recipe.yaml").read_text()
    lists = "data: {train: [a], validation: [b], batch_size: 1}"
    (run / "recipe.yaml").write_text(re.sub(r"data: \{path.*", lists, recipe))
    assert "its volumes are where data.train says" in write_report(run).read_text()


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    """Three times the same seed would make intervals narrow."""
    run = write_run(tmp_path / "a", seed=0, noise=0.2)
    again = tmp_path / "link"
    again.symlink_to(run)
    with pytest.raises(DataError, match="is given twice"):
        write_report(run, again)
    with pytest.raises(DataError, match="is given twice"):
        read_comparison([run, write_run(tmp_path / "b", seed=1, noise=0.2), again])


@pytest.mark.usefixtures("undrawn")
def test_runs_of_one_seed_are_not_two_seeds(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, seed=0, noise=0.2) for name in ("cut", "whole")]
    changed(paths[0], grid={"depth": 2})
    paths.append(write_run(tmp_path / "other", seed=1, noise=0.2))
    found = read_comparison(paths).configurations
    assert [(one.name, len(one.runs)) for one in found] == [("cut", 2), ("whole", 1)]
    page = write_comparison(paths).read_text()
    assert ">grid" in page.partition("What differs in their recipes")[2]


@pytest.mark.usefixtures("undrawn")
def test_long_names_give_way_to_folders_and_a_table(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name / "run", seed=0, noise=0.2) for name in ("a", "b")]
    changed(paths[1], optimizer={"name": "sgd", "momentum": 0.9, "learning_rate": 1e-5, "x": 1})
    assert [one.name for one in read_comparison(paths).configurations] == ["a/run", "b/run"]
    page = write_comparison(paths).read_text()
    shown = page.partition("What differs in their recipes")[2].partition("</table>")[0]
    assert "momentum" in shown
    assert "None" not in page
    changed(paths[0], optimizer={"name": "adam"})
    changed(paths[1], optimizer={"name": "sgd"}, model={"name": "mine", "variant": "paper2020"})
    names = [one.name for one in read_comparison(paths).configurations]
    assert names[1] == "model.name=mine, optimizer.name=sgd"


def test_predictions_that_are_no_numbers_are_not_the_reference(tmp_path: Path) -> None:
    bad = changed(write_run(tmp_path / "bad", seed=0, noise=0.2), epochs=7)
    good = write_run(tmp_path / "good", seed=0, noise=0.3)
    file = bad / "evaluation" / "predictions.csv"
    head, first, *others = rows(file)
    cells = first.split(",")
    cells[3] = "nan"
    file.write_text("\n".join([head, ",".join(cells), *others, ""]))
    for pair in ([bad, good], [good, bad]):
        comparison = read_comparison(pair)
        assert comparison.reference.name == "epochs=12"
    write_comparison([bad, good])
    words = learnt_words({"sigma_8": ConfidenceInterval(np.nan, np.nan, np.nan)})
    assert words.startswith("Predicted with values that are not finite: σ₈")
    assert "Not distinguishable" not in words


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_a_whole_epoch_is_compared_as_far_as_it_is(tmp_path: Path) -> None:
    begun = changed(write_run(tmp_path / "begun", seed=0, noise=0.2), epochs=7)
    (begun / "epochs.csv").write_text(rows(begun / "epochs.csv")[0] + "\n")
    done = write_run(tmp_path / "done", seed=0, noise=0.3)
    page = write_comparison([begun, done]).read_text()
    assert "No epoch is done of epochs=7." in page


@pytest.mark.usefixtures("undrawn")
def test_without_a_whole_epoch_there_is_nothing_to_compare(tmp_path: Path) -> None:
    begun = changed(write_run(tmp_path / "begun", seed=0, noise=0.2), epochs=7)
    (begun / "epochs.csv").write_text(rows(begun / "epochs.csv")[0] + "\n")
    done = write_run(tmp_path / "done", seed=0, noise=0.3)
    assert loss_curves(read_comparison([begun])) == []
    assert "No epoch is done yet." in write_comparison([begun], output=tmp_path / "x").read_text()
    assert (
        "Losses are not compared: no epoch of begun is done."
        in write_report(done, begun).read_text()
    )


@pytest.mark.usefixtures("undrawn")
def test_two_runs_of_different_losses_have_a_scale_each(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", seed=0, noise=0.2)
    other = changed(write_run(tmp_path / "other", seed=1, noise=0.2), loss="l1")
    page = write_report(one, other).read_text()
    assert "trained on different losses, mse and l1, which cannot be compared" in page
    assert "Losses by epoch, one" in page
    assert "Losses by time, other" in page
    ids = re.findall(r"\bid=\"([^\"]*)\"", page)
    assert len(ids) == len(set(ids))


def test_losses_below_zero_are_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", seed=0, noise=0.2)
    text = rows(run / "epochs.csv")
    below = [",".join(f"-{cell}" if 0 < at < 4 else cell for at, cell in enumerate(row.split(",")))
             for row in text[1:]]  # fmt: skip
    (run / "epochs.csv").write_text("\n".join([text[0], *below, ""]))
    picture = loss_curves(read_comparison([run]))[0]
    assert picture.figure is not None
    assert picture.figure.axes[0].get_yscale() == "linear"


@pytest.mark.usefixtures("undrawn")
def test_few_volumes_have_no_intervals(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        run = changed(write_run(tmp_path / name, seed=0, noise=0.2), epochs=ord(name))
        for file in (run / "evaluation").iterdir():
            file.unlink()
        (run / "evaluation").rmdir()
        write_evaluation(run / "evaluation", noise=0.2, volumes=4)
        runs.append(run)
    page = write_comparison(runs).read_text()
    table = page.partition("and the 95 % interval")[2].partition("</table>")[0]
    assert "\N{EN DASH}" not in table
    assert "with fewer than 5 volumes there are none" in page


def test_a_control_of_the_name_of_a_run_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", seed=0, noise=0.2)
    with pytest.raises(DataError, match="two runs or controls are called paper2020"):
        read_comparison([run], [("paper2020", run / "evaluation")])


def test_volumes_of_one_name_and_other_truths_are_not_compared(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, seed=seed, noise=0.2) for seed, name in enumerate("ab")]
    changed(runs[1], data={"path": "others", "subvolume": 64})
    read_comparison(runs)
    file = runs[1] / "evaluation" / "predictions.csv"
    head, first, *others = rows(file)
    cells = first.split(",")
    cells[2] = "0.9"
    file.write_text("\n".join([head, ",".join(cells), *others, ""]))
    with pytest.raises(DataError, match=r"true values of .*b/evaluation are not .*a/evaluation"):
        read_comparison(runs)


@pytest.mark.usefixtures("undrawn")
def test_what_was_changed_on_the_way_is_told(tmp_path: Path) -> None:
    """The recipe has the last values alone."""
    run = fake_run(tmp_path, epochs=3, wanted=3)
    assert "was resumed" not in write_report(run).read_text()
    record_changes(run, 12, {"optimizer.learning_rate": [0.001, 0.0001], "epochs": [2, 3]})
    record_changes(run, 18, {"optimizer.clip": [None, "<b>"]})
    table = write_report(run).read_text().partition("changed when the run was resumed")[2]
    cells = re.findall(r">([^<>]*)</t[hd]>", table.partition("</table>")[0])
    assert cells[5:9] == ["optimizer.learning_rate", "0.001", "0.0001", "12"]
    assert "&lt;b&gt;" in cells
    for broken in ("[1]", '{"step": 1}', "no JSON", '{"date": 1, "step": 1, "changes": {"a": 1}}'):
        (run / "changes.jsonl").write_text(broken + "\n")
        with pytest.raises(DataError, match=r"changes\.jsonl holds no changes of a recipe"):
            write_report(run)


def test_a_table_of_holes_is_not_read(tmp_path: Path) -> None:
    run = fake_run(tmp_path, epochs=3)
    with (run / "steps.csv").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match=r"steps\.csv cannot be read as CSV: a line has more than"):
        write_report(run)


def test_an_event_file_of_a_year_that_is_none(tmp_path: Path) -> None:
    run = fake_run(tmp_path, epochs=3)
    (run / "tensorboard").mkdir(exist_ok=True)
    found = read_run(run).started
    (run / "tensorboard" / f"events.out.tfevents.{10**20}.host").touch()
    assert read_run(run).started == found
    (run / "tensorboard" / "events.out.tfevents.86400.host").touch()
    assert read_run(run).started == datetime.datetime(1970, 1, 2, tzinfo=datetime.UTC)
