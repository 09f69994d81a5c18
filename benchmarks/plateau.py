"""How much of what each layer says is the same for all samples: why a network predicts the mean.

    python benchmarks/plateau.py RECIPE [key=value ...] [--samples 48] [--steps 64] [--json OUT]

RECIPE is one that `hyperslab train` takes. Its network sees samples of the training split in its
training mode, as it starts and after some steps of Adam. Rows: layers. ``common`` is the share of
the energy of a layer's outputs (of maps: of their means by channel) that belongs to the mean over
samples, at the start and after the steps. What is left tells samples apart. ``gradient``, after the
steps, is the norm of the gradient of the layer's parameters over that of the parameters, of one
mini-batch of all these samples.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from clock import machine
from torch import nn
from torch.nn import functional as F

import hyperslab as hs
from hyperslab.recipe.load import load_recipe
from hyperslab.train.builders import data_card, open_data
from hyperslab.train.network import build_network

ALONE = tuple(f"grid.{axis}=1" for axis in ("data", "depth", "height", "width"))


def common_share(outputs: torch.Tensor) -> float:
    """The share of the energy of rows (N, F) that belongs to their mean, without its noise.

    The mean of N rows has 1 / N of the energy of what differs between them.
    """
    energy = outputs.square().sum(1).mean().item()
    differing = outputs.var(0).sum().item()
    return max(0.0, 1 - differing / energy) if energy else 1.0


def rows_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[dict[str, Any]]:
    """What each layer without parts of its own says of the samples ``x``, and its gradient."""
    said: dict[str, torch.Tensor] = {}
    layers = {name: m for name, m in model.named_modules() if not list(m.children())}
    hooks = [
        module.register_forward_hook(
            lambda _module, _inputs, output, name=name: said.update(
                {name: output.detach().double().flatten(2).mean(2)}
                if output.dim() > 2
                else {name: output.detach().double()}
            )
        )
        for name, module in layers.items()
    ]
    model.zero_grad()
    F.mse_loss(model(x), y).backward()
    for hook in hooks:
        hook.remove()
    return [
        {"layer": name, "common": common_share(said[name]), "gradient": _gradient(layers[name])}
        for name in said
    ]


def _gradient(layer: nn.Module) -> float | None:
    parameters = [p for p in layer.parameters() if p.grad is not None]
    if not parameters:
        return None
    size = nn.utils.get_total_norm([p.detach() for p in parameters])
    return (nn.utils.get_total_norm([p.grad for p in parameters]) / size).item()


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
        model = build_network(recipe, data_card(data)).train()
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
    for row, after in zip(rows, rows_of(model, x, y), strict=True):
        row["common_after"] = after["common"]
        row["gradient"] = after["gradient"]
        gradient = "" if row["gradient"] is None else f"{row['gradient']:12.2e}"
        print(f"{row['layer']:24}{row['common']:10.4f}{row['common_after']:10.4f}{gradient}")
    if options.json is not None:
        facts = {"samples": len(x), "steps": options.steps, "rate": rate, "rows": rows}
        options.json.write_text(json.dumps({"machine": machine(), **facts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
