"""No file is written through a link that somebody has put there (tier: no process)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hyperslab.train.history import STEP_COLUMNS, HistoryFile
from hyperslab.train.run import LOCK_FILE, lock_run
from hyperslab.util.atomic_files import (
    append_whole,
    created_aside,
    make_scratch,
    open_to_append,
    partial_path,
    remove_scratch,
    write_bytes,
    write_csv,
    write_json,
    write_text,
)

WRITERS = {
    "text": lambda path: write_text(path, "new"),
    "bytes": lambda path: write_bytes(path, b"new"),
    "csv": lambda path: write_csv(path, ["new"], []),
    "json": lambda path: write_json(path, "new"),
}


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "precious"
    path.parent.mkdir()
    path.write_text("precious")
    return path


@pytest.mark.parametrize("kind", WRITERS)
def test_a_link_under_the_partial_name_is_not_followed(
    tmp_path: Path, precious: Path, kind: str
) -> None:
    path = tmp_path / "out"
    partial_path(path).symlink_to(precious)
    WRITERS[kind](path)
    assert precious.read_text() == "precious"
    assert "new" in path.read_text()
    assert not path.is_symlink()


@pytest.mark.parametrize("hard", [False, True])
def test_nor_is_one_under_a_process_s_own_name(tmp_path: Path, precious: Path, hard: bool) -> None:
    path = tmp_path / "out.npz"
    link = tmp_path / f".out.npz.partial.{os.getpid()}"
    link.hardlink_to(precious) if hard else link.symlink_to(precious)
    with created_aside(path, concurrent=True) as file:
        np.savez(file, x=np.zeros(3))
    assert precious.read_text() == "precious"
    assert np.load(path)["x"].shape == (3,)


def test_a_link_that_comes_between_is_an_error(
    tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    unlink = Path.unlink

    def attack(self: Path, missing_ok: bool = False) -> None:
        unlink(self, missing_ok=missing_ok)
        if not self.exists():
            self.symlink_to(precious)

    monkeypatch.setattr(Path, "unlink", attack)
    with pytest.raises(FileExistsError), created_aside(path):
        raise AssertionError("never")
    assert precious.read_text() == "precious"


def test_journals_and_locks_do_not_grow_through_links(tmp_path: Path, precious: Path) -> None:
    for name in ("journal.jsonl", "steps.csv", LOCK_FILE):
        (tmp_path / name).symlink_to(precious)
    with pytest.raises(OSError, match="is a link"):
        append_whole(tmp_path / "journal.jsonl", b"more\n")
    with pytest.raises(OSError, match="is a link"):
        os.close(open_to_append(tmp_path / "journal.jsonl"))
    with pytest.raises(OSError, match="is a link"), lock_run(tmp_path):
        raise AssertionError("never")
    HistoryFile(tmp_path / "steps.csv", STEP_COLUMNS, before=0).close()  # it is written anew
    assert not (tmp_path / "steps.csv").is_symlink()
    assert precious.read_text() == "precious"


def test_a_scratch_folder_is_made_anew(tmp_path: Path, precious: Path) -> None:
    scratch = tmp_path / ".partial"
    scratch.symlink_to(precious.parent)
    make_scratch(scratch)
    assert not scratch.is_symlink()
    assert precious.read_text() == "precious"
    (scratch / "half").write_text("of a run that was killed")
    make_scratch(scratch)
    assert not list(scratch.iterdir())
    remove_scratch(scratch)
    assert not scratch.exists()
    scratch.write_text("somebody's")
    make_scratch(scratch)
    assert scratch.is_dir()
