"""The command line as a whole (tier: no process group, three child processes)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hyperslab.cli import COMMANDS, app
from hyperslab.cli.terminal import DEBUG, clean_errors
from hyperslab.errors import DataError

# Every ending in a fork of one process: to start one takes seconds.
ENDINGS = """
import atexit, os, sys
import hyperslab.cli as cli
from hyperslab.errors import DataError

def app(**_):
    print("out")
    exec(end)

atexit.register(os.abort)  # as a worker thread may
cli.app = app
for number, end in enumerate(sys.argv[1:]):
    if os.fork() == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}{number}", os.O_WRONLY | os.O_CREAT), stream)
        cli.main()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
os._exit(0)
"""

MESSAGE = "a.hdf5 has no key 'full' [see the docs]\n    convert it first"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="hyperslab")


def test_help_lists_the_commands_and_shortens_no_line() -> None:
    listed = run("--help").stdout
    assert [name for name in COMMANDS if name not in listed] == []
    assert "..." not in listed.replace("COMMAND [ARGS]...", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0
    assert f"hyperslab {command}" in done.stdout


def test_help_keeps_units_in_brackets() -> None:
    assert "surface Dice [mm]" in run("evaluate", "--help").stdout


def test_an_unknown_command_is_refused() -> None:
    done = run("trian")
    assert done.exit_code == 2
    assert "trian" in done.stderr


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("debug", "shown"), [((), False), (("--debug",), True)])
def test_a_process_ends_with_the_error_and_not_with_a_traceback(
    tmp_path: Path, debug: tuple[str, ...], shown: bool
) -> None:
    command = [sys.executable, "-m", "hyperslab", *debug, "evaluate", str(tmp_path / "nowhere")]
    environment = {name: value for name, value in os.environ.items() if name != DEBUG}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert ("Traceback" in done.stderr) is shown
    assert done.stderr.startswith("error: ") is not shown


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


EXPECTED = {
    "sys.exit()": (0, ""),
    "sys.exit(143)": (143, ""),
    "sys.exit('words')": (1, "words\n"),
    "raise DataError('bad')": (1, "error: bad\n"),
    "1 / 0": (1, "Traceback"),
    "raise KeyboardInterrupt": (130, "stopped by SIGINT\n"),
}


def test_a_rank_ends_before_the_interpreter_shuts_down(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != DEBUG}
    done = subprocess.run(
        [sys.executable, "-c", ENDINGS, *EXPECTED],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env={**environment, "RANK": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    codes = [int(line) for line in done.stdout.split()]
    for number, (end, (code, words)) in enumerate(EXPECTED.items()):
        assert codes[number] == code, end
        assert (tmp_path / f"out{number}").read_text() == "out\n", end
        said = (tmp_path / f"err{number}").read_text()
        assert said.startswith(words), end
        assert words or not said, end
