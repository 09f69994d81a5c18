"""The comparison on a GPU, on small shapes wherever there is none (tier: one process)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gpu
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NETWORK = gpu.TINY[1]


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> None:
    words = ["gpu.py", "--tiny", "--device", DEVICE, "--case", NETWORK.name, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*words, "--steps", "1", "--turns", "1", "--with", *more])
    gpu.main()


def test_a_run_goes_on_where_the_last_one_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.jsonl"
    run(monkeypatch, out, "eager")
    first = out.read_text()
    run(monkeypatch, out, "eager", "hyperslab")
    assert out.read_text().startswith(first)
    eager, ours = (json.loads(line) for line in out.read_text().splitlines())
    assert (eager["variant"], ours["variant"]) == ("eager", "hyperslab")
    assert 0 < ours["best"] <= ours["median"]
    assert ours["flops"] == eager["flops"] > 1e8
    assert capsys.readouterr().out.count(f"| {NETWORK.name} | eager |") == 2


def test_what_does_not_fit_is_written_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def large(*_: object) -> gpu.Runner:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")

    out = tmp_path / "gpu.jsonl"
    monkeypatch.setitem(gpu.VARIANTS, "compiled", large)
    run(monkeypatch, out, "compiled", "distconv")
    too_large, absent = (json.loads(line) for line in out.read_text().splitlines())
    assert "Tried to allocate 80 GiB" in too_large["failed"]
    assert "--distconv PATH" in absent["failed"]
    where = {key: too_large[key] for key in ("processor", "torch")}
    assert list(gpu.done(out, where)) == [(NETWORK.name, "compiled")]  # the other may come yet
    assert "Tried to allocate" in capsys.readouterr().out


def test_variants_compute_the_same(tmp_path: Path) -> None:
    options = gpu.argparse.Namespace(device=DEVICE)
    gradients = []
    for variant in ("eager", "hyperslab"):
        runner = gpu.build(NETWORK, variant, options)
        case = runner.case
        case.loss(runner.forward().float(), case.y).backward()
        gradients.append([p.grad for p in case.model.parameters()])
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
