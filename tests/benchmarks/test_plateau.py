"""The share of what layers say that is the same for all samples (tier: no process)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import plateau
import pytest
import torch
from plateau import common_share, rows_of
from torch import nn


def test_noise_has_nothing_in_common_and_a_constant_everything() -> None:
    torch.manual_seed(0)
    noise = torch.randn(500, 30, dtype=torch.float64)
    assert common_share(noise) < 0.01
    assert common_share(torch.ones(7, 3)) == 1
    assert common_share(noise + 3) == pytest.approx(0.9, abs=0.01)
    assert common_share(noise[:5] + 3) == pytest.approx(0.9, abs=0.03)  # few samples


def test_layers_come_in_order_with_gradients_of_those_with_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(2, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1))
    rows = rows_of(model, torch.randn(6, 2, 2, 2, 2), torch.randn(6, 1))
    assert [row["layer"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["gradient"] is None for row in rows] == [False, True, True, False]
    assert all(0 <= row["common"] <= 1 for row in rows)


def test_the_command_prints_and_writes_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {name: multiscale, channels: [3, 5]}\n"
        "data: {synthetic: {width: 8, channels: 2}, batch_size: 4}\n"
    )
    out = tmp_path / "rows.json"
    arguments = ["plateau.py", str(path), "--samples", "6", "--steps", "3", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    plateau.main()
    found = json.loads(out.read_text())
    assert (found["samples"], found["steps"]) == (6, 3)
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert printed == [row["layer"] for row in found["rows"]]
    assert "head.6" in printed
    assert all(row["common_after"] <= 1 for row in found["rows"])
