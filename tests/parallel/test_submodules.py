"""A part of a parallelised module called by itself is refused (tier: a few gloo ranks)."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from tests.ranks import run_ranks


class Net(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.ReLU())
        self.head = nn.Conv3d(2, 1, 1)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return self.head(checkpoint(self.features, x, use_reentrant=False))
        return self.head(self.features(x))


def call_a_part() -> str:
    grid = hs.Grid(depth=2)
    model = hs.parallelize(Net(), grid)
    x = hs.shard(torch.ones(1, 1, 6, 4, 4), grid)
    with torch.no_grad():
        assert model.features(x).shape == (1, 2, 6, 4, 4)
    with pytest.raises(hs.LayoutError) as error:
        model.features(x)
    return str(error.value)


def train_once(checkpointed: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    grid = hs.Grid(depth=2)
    model = hs.parallelize(Net(checkpointed=checkpointed), grid)
    x = hs.shard(torch.randn(1, 1, 6, 4, 4), grid)
    model(x).mean().backward()
    return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


def test_a_part_by_itself_is_refused() -> None:
    message = run_ranks(2, call_a_part)[0]
    assert "Conv3d was called outside the forward of the parallelised Net" in message


def test_recomputation_is_not() -> None:
    plain = run_ranks(2, train_once, False)[0]
    recomputed = run_ranks(2, train_once, True)[0]
    assert all(torch.allclose(a, b) for a, b in zip(plain, recomputed, strict=True))
