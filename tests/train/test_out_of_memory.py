"""A device without memory left: who, where, and what would fit (tier: no process)."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hyperslab as hs
from hyperslab.cli import train as command
from hyperslab.errors import HyperslabError
from hyperslab.planner import auto
from hyperslab.train.run import _clear_errors, layer_of

SAID = "CUDA out of memory. Tried to allocate 8.00 GiB."


class Greedy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError(f"{SAID}\nGPU 0 has a total capacity of 79 GiB")


def network() -> nn.Module:
    return nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.Sequential(nn.ReLU(), Greedy())))


def failing(layers: bool) -> None:
    """Inside what surrounds a training."""
    recipe: Any = SimpleNamespace(timeout=60)
    with _clear_errors(hs.Grid(), recipe):
        if layers:
            network()(torch.ones(1, 2))
        raise torch.OutOfMemoryError(SAID)


@pytest.mark.parametrize(
    ("layers", "where"),
    [(True, "in b.1 (Greedy)"), (False, "in the backward pass or the optimizer's step")],
)
def test_rank_and_layer_are_named(layers: bool, where: str) -> None:
    with pytest.raises(HyperslabError) as caught:
        failing(layers)
    assert str(caught.value) == f"rank 0 of 1 ran out of the memory of cpu {where}\n    {SAID}"
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_the_network_itself_is_named_where_it_has_no_layers() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        Greedy()(torch.ones(1))
    assert layer_of(caught.value) == "Greedy"


@pytest.mark.parametrize("known", [True, False])
def test_the_command_adds_what_would_fit(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    def advice(*_: object) -> str:
        if known:
            return "by the plan 3 GiB would do: grid.depth=4"
        raise HyperslabError("no such machine")

    monkeypatch.setattr(auto, "advice_for_memory", advice)
    recipe: Any = type("R", (), {"undecided": False})()
    words = "3 GiB would do: grid.depth=4$" if known else "cannot say what would fit: .*no such"
    with pytest.raises(HyperslabError, match=words) as caught, command._advising(recipe, None):
        failing(True)
    assert str(caught.value).startswith("rank 0 of 1 ran out")
    with pytest.raises(HyperslabError, match=r"^another$"), command._advising(recipe, None):
        raise HyperslabError("another")
