"""The soak ends at a violation and says how to repeat it (tier: no process)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.soak import __main__ as command
from tests.soak import kills
from tests.soak.campaign import Campaign, Settings, Unavailable, Violation, must, patience


class Calm(Campaign):
    """Nothing ever happens; the folder is used."""

    ended: list[int] = []  # noqa: RUF012

    def play(self, number: int) -> str:
        (self.settings.folder / "used").touch()
        return f"drew {self.rng(number).random():.6f}"

    def close(self) -> None:
        self.ended.append(1)


class Faulty(Calm):
    def play(self, number: int) -> str:
        (self.settings.folder / "proof").touch()
        must(number != 2, "two is odd")
        if number == 5:
            raise KeyError("not foreseen")
        return "even"

    def summary(self) -> dict[str, int]:
        return {"checked": 7}


class Elsewhere(Campaign):
    def __init__(self, settings: Settings) -> None:
        raise Unavailable("not on this machine")

    def play(self, number: int) -> str:
        raise AssertionError


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "KINDS", {"calm": Calm, "faulty": Faulty, "elsewhere": Elsewhere})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_cases_are_drawn_from_the_seed_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = []
    for arguments in (["--cases", "3"], ["--cases", "1", "--first", "2"], ["--seed", "1"]):
        assert command.main(["--kind", "calm", "--cases", "3", *arguments]) == 0
        lines = [w for w in capsys.readouterr().out.splitlines() if "drew" in w]
        found.append([line.split("calm ")[1] for line in lines])
    assert len(found[0]) == 3
    assert found[1] == found[0][2:]
    assert not {*found[2]} & {*found[0]}
    assert not [*tmp_path.glob("soak-*")], "nothing is left"


def test_a_violation_ends_it_and_is_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    Calm.ended.clear()
    assert command.main(["--kind", "faulty", "--json", str(report)]) == 1
    text = capsys.readouterr().out
    assert "VIOLATION faulty 2: two is odd" in text
    assert "python -m tests.soak --kind faulty --seed 0 --first 2 --cases 1 --ranks 4" in text
    (folder,) = tmp_path.glob("soak-faulty-*")
    assert str(folder) in text
    assert (folder / "proof").exists()
    summary = json.loads(report.read_text())
    assert summary["violation"] == "faulty 2: two is odd"
    assert summary["kinds"]["faulty"]["cases"] == 2
    assert summary["kinds"]["faulty"]["checked"] == 7
    assert Calm.ended == [1]


class Broken(Calm):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        (settings.folder / "proof").touch()
        must(False, "it does not begin")


def test_a_start_that_fails_is_a_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Campaigns that have started end, and the others do not begin."""
    monkeypatch.setattr(command, "KINDS", {"calm": Calm, "broken": Broken, "later": Faulty})
    Calm.ended.clear()
    assert command.main(["--kind", "calm", "--kind", "broken", "--kind", "later"]) == 1
    text = capsys.readouterr().out
    assert "VIOLATION broken 0: it does not begin" in text
    assert "later" not in text
    assert Calm.ended == [1]
    assert [*tmp_path.glob("soak-broken-*/proof")]


def test_the_start_of_kills_leaves_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that does not come to its end is ended, and that is a violation."""
    begun: list[subprocess.Popen[str]] = []

    def begin(*_: object) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        begun.append(subprocess.Popen(["sleep", "60"], stdout=pipe, stderr=pipe, text=True))
        return begun[0]

    monkeypatch.setattr(kills.Kills, "begin", begin)
    monkeypatch.setattr(kills, "PATIENCE", 0.01)
    with pytest.raises(Violation, match="the undisturbed run did not come within"):
        kills.Kills(Settings(0, 2, tmp_path))
    assert begun[0].poll() is not None


def test_patience_grows_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for load, expected in ((0.1, 60), (2.0, 60), (16.0, 480)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert patience(60) == expected


def test_an_error_of_the_campaign_is_a_violation(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--kind", "faulty", "--first", "5"]) == 1
    assert "KeyError: 'not foreseen'" in capsys.readouterr().out


def test_what_cannot_be_had_here_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--kind", "elsewhere", "--kind", "calm", "--cases", "1"]) == 0
    text = capsys.readouterr().out
    assert "elsewhere: left out, not on this machine" in text
    assert '"elsewhere": "not on this machine"' in text


def test_the_time_is_shared(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--kind", "calm", "--minutes", "0.0005"]) == 0
    assert "calm 0: " in capsys.readouterr().out
