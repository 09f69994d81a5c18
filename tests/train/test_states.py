"""Metrics that add up mini-batches by themselves are refused (tier: one process)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hyperslab as hs
from hyperslab.errors import RecipeError
from tests.recipe.own_classes import Blobs, Net


class Sums(torch.nn.Module):
    """As torchmetrics has them: a call adds a mini-batch, `compute` gives the result of all."""

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (prediction - target).abs().mean()

    def compute(self) -> torch.Tensor:
        return torch.zeros(())

    def reset(self) -> None:
        pass


@pytest.mark.parametrize("key", ["loss", "metrics"])
def test_what_a_program_hands_in(tmp_path: Path, key: str) -> None:
    keys = {"loss": Sums()} if key == "loss" else {"metrics": {"a": Sums()}}
    words = r"(the loss|metrics\.a) adds up mini-batches in a state of its own \(compute\(\), reset"
    with pytest.raises(RecipeError, match=words):
        hs.fit(Net(1, 1), Blobs(8), output=tmp_path / "run", batch_size=4, device="cpu", **keys)
