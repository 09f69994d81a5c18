"""Errors that are not hyperslab's own, and yet one line (tiers: no process; one command)."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hyperslab.cli import terminal
from hyperslab.cli.terminal import DEBUG, clean_errors
from hyperslab.errors import CommError
from hyperslab.util.logs import StdoutHandler


def test_no_memory_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit), clean_errors():
        raise MemoryError("Unable to allocate 64.0 GiB")
    assert capsys.readouterr().err == "error: out of memory: Unable to allocate 64.0 GiB\n"
    with pytest.raises(SystemExit), clean_errors():
        torch.empty(1 << 60, dtype=torch.uint8)
    words = "can't allocate memory: you tried to allocate 1152921504606846976 bytes"
    assert capsys.readouterr().err == f"error: out of memory: {words}\n"
    with pytest.raises(SystemExit), clean_errors():
        torch.empty(1 << 40, 1 << 40)
    assert capsys.readouterr().err.startswith("error: out of memory: Storage size calculation ")
    with pytest.raises(RuntimeError, match="of somebody's"), clean_errors():
        raise RuntimeError("of somebody's")
    monkeypatch.setenv(DEBUG, "1")
    with pytest.raises(MemoryError), clean_errors():
        raise MemoryError


def test_words_come_before_the_end_by_who_started_the_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun sends SIGTERM to all other ranks when the first has failed."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))

    def say_late(words: str) -> str:
        signal.raise_signal(signal.SIGTERM)
        return words

    monkeypatch.setattr(terminal, "printable", say_late)
    try:
        with pytest.raises(SystemExit) as end, clean_errors():
            raise CommError("rank 1 lost contact with rank 2")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (end.value.code, came) == (1, [])
    assert capsys.readouterr().err == "error: rank 1 lost contact with rank 2\n"


def test_a_name_that_is_too_long_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a" * 300
    with pytest.raises(SystemExit), clean_errors():
        Path(name).is_file()
    assert capsys.readouterr().err == f"error: File name too long: {name}\n"


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_behind_the_standard_output_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", FullDisk())
        StdoutHandler().emit(logging.makeLogRecord({"msg": "a step"}))  # which ends no training
        with pytest.raises(SystemExit) as end, clean_errors():
            print("a result", flush=True)
    assert end.value.code == 1
    assert capsys.readouterr().err == "error: No space left on device\n"


def test_a_current_folder_that_goes_meanwhile_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError), clean_errors():
        (tmp_path / "none").read_text()
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(SystemExit), clean_errors():
        Path("x").absolute()
    monkeypatch.chdir(tmp_path)
    assert capsys.readouterr().err.startswith("error: the current folder has been removed\n")


def test_a_command_in_a_folder_that_was_removed(tmp_path: Path) -> None:
    """Before anything is imported that would end on it."""
    line = f"mkdir {tmp_path}/here; cd {tmp_path}/here; rmdir {tmp_path}/here; exec "
    done = subprocess.run(
        ["sh", "-c", f'{line}"$0" -m hyperslab report .', sys.executable],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the current folder has been removed\n"), done.stderr
    assert "Traceback" not in done.stderr
