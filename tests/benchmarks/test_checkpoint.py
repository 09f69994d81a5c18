"""The benchmark of checkpoints runs and adds up (tier: one gloo rank)."""

from __future__ import annotations

from pathlib import Path

import checkpoint
import pytest
import torch

from tests.ranks import run_ranks


@pytest.mark.long
def test_it_measures_both_ways(tmp_path: Path) -> None:
    (found,) = run_ranks(1, checkpoint.measure, 4, 2, 0.0, tmp_path / "new")
    shares = checkpoint.shares(found)
    assert shares["wait / writing"] == pytest.approx(found["wait"] / found["writing"])
    assert 0 < found["wait"] < found["writing"]
    state = 3 * 4 * (1 + 1 / 1024)  # weights and biases, and Adam's two moments of each
    assert found["memory"] == pytest.approx(state, rel=0.01)


def test_the_state_has_the_size_that_was_asked_for() -> None:
    model, optimizer = checkpoint.state_of(8)
    weights = sum(weight.nbytes for weight in model.parameters() if weight.ndim == 2)
    assert weights == 8 << 20
    moments = [value for of in optimizer.state.values() for value in of.values()]
    assert sum(isinstance(value, torch.Tensor) and value.ndim == 2 for value in moments) == 4
