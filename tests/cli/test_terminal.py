"""Control characters of file names and contents do not reach the terminal (tier: no process)."""

from __future__ import annotations

import logging
import unicodedata
from pathlib import Path

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.cli.terminal import clean_errors, log_to_stdout
from hyperslab.errors import DataError, printable
from hyperslab.util.logs import StdoutHandler, show_logs

EVIL = "\x1b]0;title\x07\x1b[2K\r\u202e\x9b31m"


def harmful(text: str) -> list[str]:
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return [letter for letter in text if unicodedata.category(letter) in kinds and letter != "\n"]


def test_every_control_character_is_written_out() -> None:
    every = "".join(map(chr, range(0x110000)))
    assert len(harmful(every)) > 2000
    assert not harmful(printable(every))
    assert printable("Ω_m, 5 µm, 字") == "Ω_m, 5 µm, 字"
    assert printable(EVIL).startswith(r"\x1b]0;title\x07")


def test_errors_and_logs_are_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), clean_errors():
        raise DataError(f"{EVIL}.hdf5: is bad\n    do better")
    text = capsys.readouterr().err
    assert not harmful(text)
    assert ".hdf5: is bad\n    do better" in text
    record = logging.makeLogRecord({"msg": "left out: %s", "args": (EVIL,)})
    StdoutHandler().emit(record)
    shown = capsys.readouterr().out
    assert shown.startswith("left out: ")
    assert not harmful(shown)


def test_a_rank_that_a_study_has_forked_prints_what_repeats_itself_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("hyperslab")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "level", log.level)
    monkeypatch.setattr(log.root, "handlers", [])
    log_to_stdout(logging.INFO)
    show_logs(is_main=True)
    for message in ("data", "data", "epoch 1", "data"):
        log.info(message)
    assert capsys.readouterr().out == "data\nepoch 1\ndata\n"


def test_a_name_that_the_locale_cannot_write_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnicodeEncodeError), clean_errors():
        "rün".encode("ascii")  # of no file
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "utf-8")
    with pytest.raises(UnicodeEncodeError), clean_errors():
        "\udcff".encode()  # of no file, which has such a name
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    with pytest.raises(SystemExit), clean_errors():
        "rün".encode("ascii")
    assert "rün cannot be the name of a file in this locale" in capsys.readouterr().err


@pytest.mark.parametrize("good", [True, False])
def test_inspect_and_convert_of_evil_names(tmp_path: Path, good: bool) -> None:
    (tmp_path / "data").mkdir()
    with h5py.File(tmp_path / "data" / f"{EVIL.replace('/', '')}.hdf5", "w") as file:
        file["full"] = np.ones((4, 4, 4, 2), "i2")
        file["unitPar"] = np.zeros(2 if good else (2, 2))
        file["namePar"] = np.array([f"a{EVIL}", "b"], object)
    inspected = CliRunner().invoke(app, ["inspect", str(tmp_path / "data")])
    assert (inspected.exit_code == 0) is good
    assert not harmful(inspected.output)
    assert "2K" in inspected.output or not good
    command = ["convert", str(tmp_path / "data"), str(tmp_path / "out"), "--workers", "1"]
    assert not harmful(CliRunner().invoke(app, command).output)
