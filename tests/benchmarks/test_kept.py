"""Pieces of long computations, planned and compared (tier: no process)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kept
import numpy as np
import pytest
from kept import Arrays, Kept, Trial, extrapolated, run_planned

import hyperslab as hs


def work_of(made: list[str], names: list[str]) -> Callable[[Kept], dict[str, Any]]:
    """Asks for pieces, each as many seconds as its name has letters; notes those that are made."""

    def piece(folder: Kept, name: str) -> float:
        def make() -> Arrays:
            made.append(name)
            return {"found": np.array(float(len(name)))}

        def trial() -> Trial:
            return Trial(float(len(name)), {"found": np.array(0.0)})

        return float(folder.arrays("words", name, make, trial, len(name))["found"])

    return lambda folder: {"sum": sum(piece(folder, name) for name in names)}


def test_a_plan_makes_nothing_and_counts_each_piece_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    work = work_of(made, ["a", "bb", "cc", "bb"])
    assert run_planned(tmp_path, work, only_plan=True) is None
    assert made == []
    assert capsys.readouterr().out.splitlines()[1].split() == ["words", "0", "3", "5.00", "s"]
    found = run_planned(tmp_path, work, only_plan=False)
    assert made == ["a", "bb", "cc"]
    assert found is not None
    row = found["budget"]["words"]
    assert (found["sum"], row["timed"], row["expected_s"], row["unforeseen"]) == (7, 3, 5, 0)


def test_stopped_work_goes_on_and_its_budget_is_of_all_pieces(tmp_path: Path) -> None:
    made: list[str] = []
    run_planned(tmp_path, work_of(made, ["a"]), only_plan=False)
    np.savez(tmp_path / "dddd.npz", found=4.0)  # of before times were kept
    found = run_planned(tmp_path, work_of(made, ["a", "bb", "dddd"]), only_plan=False)
    assert made == ["a", "bb"]
    assert found is not None
    row = found["budget"]["words"]
    assert (found["sum"], row["pieces"], row["timed"], row["expected_s"]) == (7, 3, 2, 3)
    again = run_planned(tmp_path, work_of(made, ["a", "bb", "dddd"]), only_plan=False)
    assert again == found
    assert made == ["a", "bb"]


def test_pieces_that_no_plan_had_asked_for_are_unforeseen(tmp_path: Path) -> None:
    plan = Kept(tmp_path)
    made: list[str] = []
    work_of(made, ["aa"])(plan)
    doing = Kept(tmp_path, plan)
    work_of(made, ["aa", "bb", "c"])(doing)
    row = doing.budget()["words"]
    assert (row["timed"], row["unforeseen"], row["expected_s"]) == (3, 2, 2)


def test_a_damaged_piece_is_named(tmp_path: Path) -> None:
    run_planned(tmp_path, work_of([], ["a"]), only_plan=False)
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(whole[:40])
    with pytest.raises(hs.DataError, match=r"a\.npz: cannot be read"):
        run_planned(tmp_path, work_of([], ["a"]), only_plan=False)


def test_what_fails_keeps_what_was_made(tmp_path: Path) -> None:
    plan = Kept(tmp_path)
    work_of([], ["a"])(plan)
    doing = Kept(tmp_path, plan)
    made: list[str] = []
    work_of(made, ["a"])(doing)

    def fails() -> Arrays:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        doing.arrays("words", "bb", fails, lambda: Trial(1.0, {}), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_times_are_extrapolated_along_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3.0, 10.0, 15.0])
    monkeypatch.setattr(kept.time, "perf_counter", lambda: next(clock))
    asked: list[int] = []
    assert extrapolated(asked.append, (10, 30), 110) == pytest.approx(3 + 2 * 5)
    assert asked == [10, 30]
    clock = iter([0.0, 3.0, 10.0, 13.0])
    assert extrapolated(asked.append, (10, 30), 8) == 3
    assert asked[2:] == [8, 8]
