"""A few mutated files of every kind, and that violations are found (tier: worker processes)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperslab.checkpoint import files
from hyperslab.checkpoint.files import Checksums
from hyperslab.errors import DataError
from hyperslab.planner import machine
from tests.selection import in_gate
from tests.soak.fuzz import __main__ as command
from tests.soak.fuzz import worker
from tests.soak.fuzz.files import FILES
from tests.soak.fuzz.mutate import BINARY
from tests.soak.fuzz.subject import Subject
from tests.soak.fuzz.subjects import SUBJECTS


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "kinds", in_gate([FILES, SUBJECTS], kept=[FILES]), ids=lambda kinds: str(len(kinds))
)
def test_one_of_every_kind(capsys: pytest.CaptureFixture[str], kinds: dict[str, Subject]) -> None:
    chosen = [word for kind in kinds for word in ("--kind", kind)]
    assert command.main(["--count", str(len(kinds)), "--seed", "7", *chosen]) == 0
    assert "violation" in capsys.readouterr().out


def write(folder: Path) -> None:
    folder.mkdir()
    (folder / "a").write_bytes(bytes(range(200)))


def careless(folder: Path) -> str:
    return (folder / "a").read_bytes().hex()


def nameless(folder: Path) -> str:
    if careless(folder) != bytes(range(200)).hex():
        raise DataError("it is bad")
    return ""


def broken(folder: Path) -> str:
    return str(1 // (careless(folder) == bytes(range(200)).hex()))


@pytest.mark.parametrize(
    ("read", "words"),
    [(careless, "silently changed"), (nameless, "names no file"), (broken, "ZeroDivisionError")],
)
def test_violations_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: object, words: str
) -> None:
    subject = Subject(write, read, BINARY, "*", lambda path: True)  # type: ignore[arg-type]
    monkeypatch.setitem(worker.SUBJECTS, "toy", subject)
    player = worker.Player("toy", 0, tmp_path)
    found = [player.play(number) for number in range(20)]
    assert any(outcome == "violation" and words in why for outcome, why in found)
    assert found == [player.play(number) for number in range(20)], "cases can be repeated"


def believing(path: Path) -> Checksums:
    """Reads the sums and compares nothing."""
    return files.read_checksum_manifest(path)


def nameless_words(error: object, where: str) -> list[str]:
    return ["a value is bad"]


BROKEN: dict[str, tuple[object, str, object, str]] = {
    "checkpoint": (files, "verify_checksums", believing, "silently changed"),
    "machine": (machine, "_sentences", nameless_words, "names no file"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_reader_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Without what guards it, the campaign notices; with it, the same cases are fine."""
    module, name, broken, words = BROKEN[kind]
    player = worker.Player(kind, 0, tmp_path)
    assert not [why for outcome, why in map(player.play, range(12)) if outcome == "violation"]
    monkeypatch.setattr(module, name, broken)
    found = map(player.play, range(200))  # until the first
    assert any(outcome == "violation" and words in why for outcome, why in found)
