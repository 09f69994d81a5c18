"""The network of figure 9 with one choice made otherwise (tier: no process)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import levers
import pytest
import torch
from levers import PaperNet
from torch import nn

from hyperslab.studies.sweep.schema import load_sweep

SWEEP = Path(levers.__file__).with_name("levers_sweep.yaml")
DIMS = (2, 3, 4)


def made(**choices: Any) -> PaperNet:
    torch.manual_seed(0)
    return PaperNet(16, **choices)


@pytest.mark.parametrize(("padding", "same"), [("zeros", False), ("circular", True)])
def test_only_a_periodic_network_sees_a_shifted_volume_alike(padding: Any, same: bool) -> None:
    features = made(padding=padding, norm="none").network.features.double()
    x = torch.randn(1, 4, 16, 16, 16, dtype=torch.float64)
    # Maps of 2^3 voxels in the end: half of the volume is one of them.
    shifted = features(x.roll((8, 8, 8), DIMS)).roll((1, 1, 1), DIMS)
    assert torch.allclose(shifted, features(x)) is same


def test_each_choice_is_in_the_network() -> None:
    def kinds(net: nn.Module) -> set[type[nn.Module]]:
        return {type(module) for module in net.modules()}

    norms = {nn.BatchNorm3d, nn.GroupNorm}
    assert kinds(made()) & norms == {nn.BatchNorm3d}
    assert kinds(made(norm="group")) & norms == {nn.GroupNorm}
    assert not kinds(made(norm="none")) & norms
    x = torch.randn(2, 4, 16, 16, 16)
    assert not made()(x).any()
    assert made(zero_last=False)(x).any()


def test_training_alone_rolls_the_volume() -> None:
    net = made(shift=True, zero_last=False)
    seen: list[torch.Tensor] = []
    net.network.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    x = torch.randn(2, 4, 16, 16, 16)
    net(x)
    net(x)
    net.eval()(x)
    assert torch.equal(seen[2], x)
    for rolled, other in zip(seen[:2], (x, seen[0]), strict=True):
        assert not torch.equal(rolled, other)
        assert torch.equal(rolled.flatten().sort().values, x.flatten().sort().values)


def test_the_sweep_trains_each_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SWEEP.parents[1])
    variants = load_sweep(SWEEP).variants
    recipes = [variant.recipe.model_dump(exclude={"output"}) for variant in variants]
    rates = [variant.rates for variant in variants]
    models = [variant.recipe.model for variant in variants]
    pairs = list(zip(recipes, rates, strict=True))
    assert all(pair not in pairs[:place] for place, pair in enumerate(pairs))
    with torch.device("meta"):
        nets = [model.build((4, 64, 64, 64), 4, where="") for model in models]
    built = [type(net).__name__ for net in nets]
    assert built == ["PaperNet"] * (len(built) - 2) + ["MultiscaleNet"] * 2
