"""How much of what each layer says is the same for all samples: why a network predicts the mean.

    python benchmarks/plateau.py RECIPE [key=value ...] [--samples 48] [--steps 64] [--json OUT]

RECIPE is one that `hyperslab train` takes. Its network sees samples of the training split in its
training mode, as it starts and after some steps of Adam. Rows: its convolutions and dense layers,
measured as `layers: N` in a recipe has it, but all of the samples together and not a mini-batch of
them. ``common`` is the share of the energy of a layer's outputs (of maps: of their means by
channel) that belongs to the mean over samples, at the start and after the steps. What is left tells
samples apart. ``gradient``, after the steps, is the norm of the gradient of the layer's parameters
over that of the parameters, of one mini-batch of all these samples.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import islice
from pathlib import Path

import torch
from clock import machine
from torch import nn
from torch.nn import functional as F

import hyperslab as hs
from hyperslab.recipe.load import load_recipe
from hyperslab.train.builders import data_card, open_data
from hyperslab.train.history import LayerRow
from hyperslab.train.layers import layer_rows, random_states, repeating
from hyperslab.train.network import build_network

ALONE = tuple(f"grid.{axis}=1" for axis in ("data", "depth", "height", "width"))


def rows_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[LayerRow]:
    """What each layer says of the samples ``x``, and its gradient, as `hyperslab train` records."""
    states = random_states(x.device)
    model.zero_grad()
    F.mse_loss(model(x), y).backward()
    with repeating(model, x.device, states):
        return layer_rows(model, lambda: model(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, [*ALONE, *options.overrides])
    torch.manual_seed(recipe.seed)
    with open_data(recipe, hs.Grid(), split="train") as data:
        model = build_network(recipe, data_card(data.source)).train()
        count = max(-(-options.samples // recipe.data.batch_size), options.steps)
        batches = [(x.full(), y.full()) for x, y in islice(data.epoch(0), count)]
    x, y = (torch.cat(part)[: options.samples] for part in zip(*batches, strict=True))
    rows = rows_of(model, x, y)
    rate = recipe.optimizer.learning_rate
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for inputs, targets in batches[: options.steps]:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    found = []
    for before, after in zip(rows, rows_of(model, x, y), strict=True):
        shares = {"common": before["common"], "common_after": after["common"]}
        found.append({"layer": after["layer"], **shares, "gradient": after["ratio"]})
        name, *numbers = (math.nan if value is None else value for value in found[-1].values())
        print("{:24}{:10.4f}{:10.4f}{:12.2e}".format(name, *numbers))
    if options.json is not None:
        facts = {"samples": len(x), "steps": options.steps, "rate": rate, "rows": found}
        options.json.write_text(json.dumps({"machine": machine(), **facts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
