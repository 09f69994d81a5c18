"""Volumes that do not fit: equal numbers on two grids, and the memory of predicting one whole.

    python benchmarks/at_size.py exact [ROW ...] [--width W] [--json OUT]
    python benchmarks/at_size.py predict [ROW ...] [--width W] [--json OUT]

The rows are those of `benchmarks/large.py`. ``exact``: one forward and backward pass on two ranks
in the row's mode of memory against four ranks with memory=none, from the same synthetic sample;
the relative difference of the loss, and of all gradients together and the worst of each
parameter's (relative to its norm, or to 1e-3 of that of all). ``predict``: the most that a rank's
process takes [GiB] while it computes the output of one whole volume, without and with slabs, on 1,
2 and 4 ranks, and how far the outputs are from those of one rank without. All in fresh processes
of one thread; what OUT has already is not computed again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from clock import machine
from large import GIB, ROWS, Row
from launch import run_ranks
from resident import resident

import hyperslab as hs
from hyperslab.ops import slabs
from hyperslab.recipe.schema import Recipe
from hyperslab.train.builders import build_model, data_card, open_data
from hyperslab.train.step import autocast

ROWS_WIDTH = 512  # a smaller volume has smaller slabs, or it would have none
TWO, FOUR = {"depth": 2}, {"depth": 4}
RANKS: dict[int, dict[str, int]] = {1: {}, 2: TWO, 4: FOUR}


def run(row: dict[str, Any], axes: dict[str, int], memory: str, trains: bool) -> dict[str, Any]:
    """Compute output or loss and gradients of one sample; the gradients are averaged by then."""
    given = Row(**row).recipe(1, Path("unused"))
    recipe = Recipe.model_validate({**given, "grid": axes, "memory": memory})
    grid = hs.Grid(**axes)
    volumes = (row["width"] / ROWS_WIDTH) ** 3
    slabs.SLAB_BYTES = max(1 << 14, int(slabs.SLAB_BYTES * min(1.0, volumes)))
    torch.manual_seed(0)
    with open_data(recipe, grid, split="train", shuffle=False) as data:
        model = build_model(recipe, data_card(data.source), grid)
        x, y = next(iter(data.epoch(0)))
        torch.manual_seed(1)
        with torch.no_grad():  # CosmoFlow's last layer begins at zero: nothing had a gradient
            for parameter in model.parameters():
                if not parameter.any():
                    parameter.normal_(std=0.1)
        model.train(trains)
        with torch.set_grad_enabled(trains), autocast(grid.device, recipe.precision):
            output = model(x).float()
        if not trains:
            return {"output": output.full() if output.dim() == 2 else None, "peak": _peak()}
        if output.dim() == 2:
            loss = torch.nn.functional.mse_loss(output, y)
        else:
            loss = torch.nn.functional.cross_entropy(output, y)
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": loss.item(), "gradients": gradients, "peak": _peak()}


def _peak() -> int:
    return resident("VmHWM")


def exact(row: Row) -> dict[str, Any]:
    """Compare two ranks over slabs with four ranks without."""
    found = run_ranks(2, run, vars(row), TWO, row.memory, True)
    expected = run_ranks(4, run, vars(row), FOUR, "none", True)
    ours, theirs = found[0], expected[0]
    pairs = {n: (ours["gradients"][n], g) for n, g in theirs["gradients"].items()}
    total = torch.stack([g.norm() for _, g in pairs.values()]).norm().item()
    apart = {name: (mine - g).norm().item() for name, (mine, g) in pairs.items()}
    return {
        "loss": theirs["loss"],
        "of the loss": abs(ours["loss"] / theirs["loss"] - 1),
        "of all gradients": sum(d**2 for d in apart.values()) ** 0.5 / total,
        "of the worst parameter": max(
            d / max(pairs[name][1].norm().item(), 1e-3 * total) for name, d in apart.items()
        ),
        "peak over slabs": max(rank["peak"] for rank in found) / GIB,
        "peak without": max(rank["peak"] for rank in expected) / GIB,
    }


def predict(row: Row) -> dict[str, Any]:
    """Compute one whole volume's output on 1, 2 and 4 ranks, without and with slabs."""
    found: dict[str, Any] = {}
    reference = None
    for ranks, axes in RANKS.items():
        for memory in ("none", "tile"):
            of_ranks = run_ranks(ranks, run, vars(row), axes, memory, False)
            output = of_ranks[0]["output"]
            if reference is None:
                reference = output
            found[f"{ranks} {memory}"] = max(rank["peak"] for rank in of_ranks) / GIB
            if output is not None:
                difference = (output - reference).norm() / reference.norm()
                found[f"{ranks} {memory} apart"] = difference.item()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    kinds = {"exact": exact, "predict": predict}
    parser.add_argument("what", choices=kinds)
    parser.add_argument("row", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--width", type=int, help="voxels along each side, in place of the row's")
    parser.add_argument("--json", type=Path, metavar="OUT", help="the rows so far")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text())
    for name in options.row or ROWS:
        width = options.width or ROWS[name].width
        row = Row(**{**vars(ROWS[name]), "width": width})
        key = f"{options.what} {name} {width}"
        if key not in rows:
            rows[key] = {**machine(), **kinds[options.what](row)}
            if options.json is not None:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
        print(key, json.dumps(rows[key], indent=1), flush=True)


if __name__ == "__main__":
    main()
