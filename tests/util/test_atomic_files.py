"""Files that are there whole or not at all (tier: no process)."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from hyperslab.errors import RecipeError
from hyperslab.util.atomic_files import (
    append_whole,
    check_output,
    created_aside,
    json_lines,
    partial_path,
    try_lock,
    write_csv,
    write_json,
    write_text,
)
from hyperslab.util.documents import read_json_lines


def test_a_new_file_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with created_aside(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def write_half(path: Path, concurrent: bool) -> None:
    with created_aside(path, concurrent=concurrent) as file:
        assert Path(file.name).name.startswith(partial_path(path).name)
        file.write(b"half")
        raise KeyboardInterrupt


@pytest.mark.parametrize("concurrent", [False, True])
def test_what_fails_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, concurrent: bool
) -> None:
    path = tmp_path / "a.npz"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_half(path, concurrent)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(OSError):
        write_text(tmp_path / "a.txt", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    partial_path(path).write_text("half")
    write_text(path, "new")
    assert list(tmp_path.iterdir()) == [path]


def test_what_another_process_writes_is_left_to_it(tmp_path: Path) -> None:
    """Else the first to end would give the name to what the second has not written yet."""
    path = tmp_path / "a.txt"
    with created_aside(path) as file:
        file.write(b"first")
        with pytest.raises(OSError, match="another process is writing it"):
            write_text(path, "second")
    assert path.read_text() == "first"
    write_text(path, "second")
    assert path.read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]


def test_tables_and_values(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", ["name", "x"], [["a,b", 0.1]])
    assert (tmp_path / "a.csv").read_text() == 'name,x\n"a,b",0.1\n'
    write_json(tmp_path / "a.json", {"a": {"b": math.nan, "c": 1.5}})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": {"b": None, "c": 1.5}}


def test_a_journal_is_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    append_whole(path, json_lines([{"name": "ü"}]))
    append_whole(path, json_lines([[1, 2]]))
    size = path.stat().st_size
    append_whole(path, b'{"name": "ha')
    assert read_json_lines(path) == ([{"name": "ü"}, [1, 2]], size)
    path.write_bytes(b"no line")
    assert read_json_lines(path) == ([], 0)


def test_one_process_holds_a_lock_once(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("a") as first, (tmp_path / "lock").open("a") as second:
        assert try_lock(first.fileno())
        assert not try_lock(second.fileno())
    with (tmp_path / "lock").open("a") as third:
        assert try_lock(third.fileno())


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tmp_path / "a" / "b"
    check_output(wanted, "--out")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "access", lambda there, mode: there != tmp_path)  # root may do all
    with pytest.raises(RecipeError, match="a/b cannot be written\n    choose another --out"):
        check_output(wanted, "--out")
