"""The share of what layers say that is the same for all samples (tier: no process)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import plateau
import pytest
import torch
from plateau import rows_of
from torch import nn


def test_layers_come_in_order_and_dropout_as_the_gradients_have_it() -> None:
    torch.manual_seed(0)
    layers = [nn.Dropout(0.5), nn.Conv3d(2, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1)]
    model = nn.Sequential(*layers)
    x, y = torch.randn(6, 2, 2, 2, 2), torch.randn(6, 1)
    state = torch.get_rng_state()
    rows = rows_of(model, x, y)
    assert [row["layer"] for row in rows] == ["1", "4"]
    assert all(0 <= row["common"] <= 1 for row in rows)
    assert all(row["gradient"] > 0 for row in rows)
    torch.set_rng_state(state)
    assert rows[1]["mean"] == pytest.approx(model(x).mean().item(), rel=1e-5)


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
