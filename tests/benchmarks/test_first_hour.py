"""The first hour on a GPU, on small shapes where there is none (tiers: no process; gloo ranks)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import first_hour
import first_hour_parts as parts
import gpu
import pytest
import torch

from tests.ranks import run_ranks
from tests.selection import in_gate

TINY = parts.Options(tiny=True, device="cpu")
HERE = ["equality", "formats", "thresholds", "step-unet3d-256", "profile", "host"]
"""Parts of one process. The gate has the short ones: `.ci/run` has all where they have changed."""


def call(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> tuple[int, list[Any]]:
    """Run the command; its exit code and the lines of its file."""
    monkeypatch.setattr(sys, "argv", ["first_hour.py", "--tiny", "--out", str(out), *words])
    return first_hour.main(), first_hour.lines_of(out)


def test_every_part_that_is_listed_is_there() -> None:
    assert [*first_hour.PARTS] == [name for name in first_hour.PARTS if name in parts.PARTS]
    assert first_hour.PARTS.keys() <= parts.PARTS.keys()
    assert len(parts.PARTS) - len(first_hour.PARTS) <= len(gpu.CASES)  # some steps wait


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is run to warm up: bfloat16 takes seconds where a processor has none."""
    monkeypatch.setattr(gpu, "WARM_UP", 0)


@pytest.mark.parametrize("name", in_gate(HERE, kept=["formats", "thresholds", "profile"]))
def test_a_part_finds_what_holds(name: str) -> None:
    rows = list(parts.PARTS[name](TINY))
    assert rows
    assert all(row.get("ok", True) for row in rows)
    json.dumps(rows)


def on_pool(size: int, function: Callable[..., Any], *given: Any, **_: Any) -> list[Any]:
    return run_ranks(size, function, *given)


@pytest.mark.long
def test_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "run_ranks", on_pool)
    monkeypatch.setattr(parts, "networks_of", lambda _: [("cosmoflow", 32)])
    rows = [*parts.equality_ranks(TINY), *parts.nccl(TINY), *parts.graphs(TINY)]
    assert len(rows) == 7
    assert all(row["ok"] for row in rows)


@pytest.mark.long
def test_other_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = parts.results
    cut: list[bool] = []

    def wrong(case: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        found = original(case, dtype)
        cut.append(isinstance(case.x, parts.hs.Sharded))
        return [t * 1.05 if cut[-1] else t for t in found]

    monkeypatch.setattr(parts, "results", wrong)
    rows = parts.compared("cosmoflow", 32, {})
    assert any(cut)
    assert not any(row["ok"] for row in rows if "float32" in row["dtype"])


def test_it_goes_on_where_it_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ended well is left out, what failed comes again, what is slow is ended and kept."""
    ran: list[str] = []
    ends = {"kernels": "failed (1)"}

    def pretended(name: str, options: Any) -> dict[str, Any]:
        ran.append(name)
        versions = {"processor": "a", "torch": "b", "tiny": True}
        how = ends.get(name, "ended")
        return {"part": name, "how": how, "seconds": 1.0, "rows": [], "versions": versions}

    monkeypatch.setattr(first_hour, "run_part", pretended)
    monkeypatch.setattr(first_hour, "PARTS", dict.fromkeys(("machine", "kernels", "host"), "?"))
    out = tmp_path / "hour.jsonl"
    code, lines = call(monkeypatch, out)
    assert (code, ran) == (1, ["machine", "kernels", "host"])
    assert [line["part"] for line in lines] == ran
    ran.clear()
    ends.clear()
    out.write_text(out.read_text() + '{"part": "host", "how')  # the machine was switched off
    code, _ = call(monkeypatch, out)
    assert (code, ran) == (0, ["machine", "kernels"])
    ran.clear()
    code, _ = call(monkeypatch, out, "host")
    assert (code, ran) == (0, ["machine", "host"])
    capsys.readouterr()
    call(monkeypatch, out, "--read")
    assert capsys.readouterr().out.count("kernels: ended") == 1


def test_a_part_is_a_process_that_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its last words and what it found until then are kept."""
    program = tmp_path / "first_hour_parts.py"
    program.write_text(
        "import json, sys, time\n"
        "found = {'rows': [{'a': 1}, {'ok': False}], 'versions': {}}\n"
        "open(sys.argv[2], 'w').write(json.dumps(found))\n"
        "print('words of ' + sys.argv[1], flush=True)\n"
        "if sys.argv[1] == 'host': time.sleep(600)\n"
        "if sys.argv[1] == 'kernels': raise ValueError('no')\n"
    )
    monkeypatch.setattr(first_hour, "HERE", tmp_path)
    options = first_hour.argparse.Namespace(
        out=tmp_path / "hour.jsonl", device="cpu", tiny=True, distconv=None, minutes=0.02
    )
    slow = first_hour.run_part("host", options)
    assert slow["how"] == "stopped after 0.02 min"
    assert (slow["rows"][0], slow["words"]) == ({"a": 1}, ["words of host"])
    options.minutes = 1
    failed = first_hour.run_part("kernels", options)
    assert failed["how"] == "failed (1)"
    assert failed["words"][-1] == "ValueError: no"
    assert first_hour.run_part("formats", options)["how"] == "wrong"


@pytest.mark.long
def test_what_does_not_fit_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def large(*_: object) -> gpu.Runner:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")

    monkeypatch.setitem(gpu.VARIANTS, "hyperslab", large)
    options = parts.Options(tiny=True, device="cpu", distconv=None)
    rows = {row["variant"]: row for row in parts.step(gpu.Network("unet3d", 16), options)}
    assert "Tried to allocate 80 GiB" in rows["hyperslab"]["failed"]
    assert rows["eager"]["best [ms]"] > 0


@pytest.mark.long
def test_the_whole_hour_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, lines = call(monkeypatch, tmp_path / "hour.jsonl", "--device", "cpu")
    assert [line["part"] for line in lines] == [*first_hour.PARTS]
    assert {line["part"]: line["how"] for line in lines if line["how"] != "ended"} == {}
    assert code == 0
