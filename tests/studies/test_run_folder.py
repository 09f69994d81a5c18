"""Tables of a run's folder are read, of any author (tier: no process)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hyperslab.errors import DataError
from hyperslab.studies import run_folder
from hyperslab.studies.run_folder import read_table, read_words


def test_a_table_is_read_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('step,sample,loss\n1,"a,b",0.5\n2,c,\n3,d,inf\n4,e,0.')  # the last is begun
    found = read_table(path, ["step"])
    assert [*found] == ["step", "loss"]
    np.testing.assert_array_equal(found["step"], [1, 2, 3])
    np.testing.assert_array_equal(found["loss"], [0.5, np.nan, np.nan])
    assert read_words(path, "sample") == ("a,b", "c", "d")
    assert read_table(tmp_path / "b.csv", ["step"]) == {}


@pytest.mark.parametrize(("count", "stride"), [(0, 1), (1, 1), (8, 1), (9, 2), (37, 8)])
def test_the_steps_of_a_long_run_are_thinned_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, stride: int
) -> None:
    monkeypatch.setattr(run_folder, "MOST_THIN_CELLS", 8 * len(run_folder.NEEDED_OF_STEPS))
    (tmp_path / "recipe.yaml").write_text("epochs: 1\n")
    head = ",".join(run_folder.NEEDED_OF_STEPS)
    rows = [f"{step},0,{step / 8},,1,2\n" for step in range(1, count + 1)]
    (tmp_path / "steps.csv").write_text(f"{head}\n{''.join(rows)}")
    run = run_folder.read_run(tmp_path)
    expected = sorted({*range(1, count + 1, stride), *([count] if count else [])})
    assert run.stride == stride
    assert run.steps.get("step", np.array([])).tolist() == expected
    assert run.steps.get("loss", np.array([])).tolist() == [step / 8 for step in expected]


@pytest.mark.parametrize("count", ["", "-1", "0.5", "1e90"])
def test_what_counts_is_a_whole_number(tmp_path: Path, count: str) -> None:
    (tmp_path / "recipe.yaml").write_text("epochs: 1\n")
    (tmp_path / "epochs.csv").write_text(
        f"epoch,train_loss,validation_loss,seconds\n{count},1,1,1\n"
    )
    with pytest.raises(DataError, match=r"epochs.csv, column epoch: .* is not a whole number from"):
        run_folder.read_run(tmp_path)


def test_numbers_that_no_axis_has_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("epochs: 1\n")
    (tmp_path / "epochs.csv").write_text("epoch,train_loss,validation_loss,seconds\n0,1e308,1,1\n")
    (tmp_path / "evaluation").mkdir()
    measured = f'{{"parameters": {{"a": {{"mse": 1{"0" * 400}, "mae": 2}}}}}}'
    (tmp_path / "evaluation" / "metrics.json").write_text(measured)
    run = run_folder.read_run(tmp_path)
    assert np.isnan(run.epochs["train_loss"]).all()
    assert run.errors == {"a": {"mse": None, "mae": 2}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step\n1,2\n", "line 2: 2 cells instead of 1"),
        ("a,b\n", "has no column step; it has: a, b"),
        ("step\nx\n", "line 2, column step: 'x' is not a number"),
        ("", "has no column step"),
        ("step\n" + "1" * (2 << 20) + "\n", "a line has more than"),
        ("step\n" + "1\n" * 20, "has more than 10 cells"),
    ],
)
def test_tables_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.setattr(run_folder, "MOST_CELLS", 10)
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"a\.csv.*{words}"):
        read_table(path, ["step"])


def test_a_table_of_holes_and_one_of_too_many_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("name\na\n")
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match=r"a\.csv cannot be read as CSV: a line has more"):
        read_words(path, "name")
    monkeypatch.setattr(run_folder, "MOST_WORDS", 100)
    path.write_text("name\n" + "abc\n" * 10)
    with pytest.raises(DataError, match=r"a\.csv has more than 0 MiB of words in 'name'"):
        read_words(path, "name")


def test_a_command_to_copy_holds_for_folders_with_blanks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\n    hyperslab evaluate '.*/my run'$"):
        run_folder.check_measured_test(tmp_path / "my run" / "evaluation", {"split": "train"})
