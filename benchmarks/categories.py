"""A step's time by what it is spent on, as figure 3 of Mathuriya et al. 2018."""

from __future__ import annotations

import statistics

import torch
from layer_seconds import profile_of
from networks import Step, make_case
from torch import nn

import hyperslab as hs
from hyperslab.train.profile import Profile

OF_LAYERS = {
    nn.Conv3d: "convolutions",
    nn.ConvTranspose3d: "convolutions",
    nn.AvgPool3d: "pooling",
    nn.MaxPool3d: "pooling",
    nn.BatchNorm3d: "normalisation",
    nn.LeakyReLU: "activations",
    nn.ReLU: "activations",
    nn.Linear: "dense layers",
    nn.Dropout: "dropout",
}
OTHER = "other operators"
COMMUNICATION = ("halos", "statistics", "gradients")


def measure_categories(
    network: str, width: int, ranks: int, steps: int, dtype: torch.dtype
) -> dict[str, float]:
    """Seconds of a step of this rank by category, the mean over ``steps``; on every rank."""
    grid = hs.Grid(depth=ranks)
    case = make_case(network, width, False, grid.device)
    case.cut(grid)
    profile = profile_of(Step(case, dtype), grid, steps)
    return by_category(profile, case.model)


def by_category(profile: Profile, model: nn.Module) -> dict[str, float]:
    """Seconds of the mean step: of operators by kind of layer, of communication by row.

    ``framework`` is what remains: Python, and torch between its operators.
    """
    found: dict[str, float] = {}
    modules = dict(model.named_modules())
    for time in profile.layers:
        kind = OF_LAYERS.get(type(modules.get(time.layer)), OTHER)
        name = "optimiser" if time.stage == "optimizer" else kind
        found[name] = found.get(name, 0.0) + time.compute
    found = dict(sorted(found.items(), key=lambda item: -item[1]))
    for row in COMMUNICATION:
        found[row] = statistics.mean(step.rows[row] for step in profile.steps)
    whole = statistics.mean(step.seconds for step in profile.steps)
    return {**found, "framework": whole - sum(found.values()), "step": whole}


def print_categories(title: str, found: dict[str, float]) -> None:
    """Milliseconds, and the share of the step."""
    print(f"\n{title}")
    for name, seconds in found.items():
        print(f"{name:20}{1e3 * seconds:9.1f} ms{100 * seconds / found['step']:8.1f} %")
