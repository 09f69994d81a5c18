"""The command line as a whole (tier: no process group, a few child processes)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hyperslab.cli.errors import DEBUG, clean_errors
from hyperslab.errors import DataError

MESSAGE = "a.hdf5 has no key 'full' [see the docs]\n    convert it first"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hyperslab", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_help_lists_the_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in ("simulate", "train", "evaluate", "report"):
        assert command in done.stdout


@pytest.mark.parametrize("command", ["simulate", "train", "evaluate", "report"])
def test_every_command_has_help(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert f"hyperslab {command}" in done.stdout


def test_an_unknown_command_is_refused() -> None:
    done = run("trian")
    assert done.returncode == 2
    assert "trian" in done.stderr


def test_an_error_is_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DEBUG, raising=False)
    with pytest.raises(SystemExit) as exit_, clean_errors():
        raise DataError(MESSAGE)
    assert exit_.value.code == 1
    assert capsys.readouterr().err == f"error: {MESSAGE}\n"


def test_debug_lets_the_error_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG, "1")
    with pytest.raises(DataError), clean_errors():
        raise DataError(MESSAGE)


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), clean_errors():
        _ = 1 / 0
