"""A step of CosmoFlow by hyperslab, by LLNL's DistConv and by one process, in turn.

    python benchmarks/distconv.py PATH [--width 128] [--ranks 2] [--steps 10] [--json OUT]

``PATH`` is a source tree of github.com/LBANN/DistConv. All three sides compute the same sample with
the same weights in one process group, so allocator settings, which `hs.Grid` makes, are the same,
too; as shipped, DistConv makes none. Its convolutions are cut along the depth; before the dense
layers, for which it has no rule, `to_ddp` deals whole samples out, so rank 0 computes these alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from clock import machine, slowest, summary
from launch import run_ranks
from networks import Case, Step, make_case
from step import WARM_UP, serial_turn
from torch import nn

import hyperslab as hs

SIDES = ("serial", "distconv", "hyperslab")


class CutFeatures(nn.Module):
    """Computes CosmoFlow's convolutions on cut tensors of DistConv, its head on whole samples."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> torch.Tensor:
        y: torch.Tensor = self.model.head(self.model.features(x).to_ddp())
        return y


def distconv_case(width: int, ranks: int, path: Path) -> Case:
    """The same case as the others', cut by DistConv; all of the loss is rank 0's."""
    sys.path.insert(0, str(path))
    from distconv import DCTensor, DistConvDDP, ParallelStrategy

    case = make_case("cosmoflow", width, False, torch.device("cpu"))
    strategy = ParallelStrategy(num_shards=(ranks,), shard_dim=(2,), device_type="cpu")
    model = DistConvDDP(CutFeatures(case.model), parallel_strategy=strategy)
    target = case.y if strategy.rank == 0 else case.y[:0]

    def loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target, reduction="sum") / case.y.numel()

    return Case(model, DCTensor.distribute(case.x, strategy), case.y, loss)


def compare(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """Times of forward and backward of each side, turn by turn, and their last losses."""
    grid = hs.Grid(depth=options.ranks)
    case = make_case("cosmoflow", options.width, False, grid.device)
    serial = Step(case, dtype) if grid.is_main else None
    other = Step(distconv_case(options.width, options.ranks, options.path), dtype)
    ours = make_case("cosmoflow", options.width, False, grid.device)
    ours.cut(grid)
    own = Step(ours, dtype)
    turns = []
    for _ in range(WARM_UP + options.steps):
        alone, _busy = serial_turn(serial, grid, options.ranks)
        turn = [sum(alone[:2])]
        for step in (other, own):
            grid.barrier()
            turn.append(sum(slowest(step.run(), grid.device)[:2]))
        turns.append(dict(zip(SIDES, turn, strict=True)))
    turns = turns[WARM_UP:]
    found: dict[str, Any] = {side: summary([turn[side] for turn in turns]) for side in SIDES}
    for side in SIDES[:2]:
        found[f"hyperslab / {side}"] = summary([turn["hyperslab"] / turn[side] for turn in turns])
    if serial is not None:
        steps = (serial, other, own)
        found["losses"] = {s: step.loss.item() for s, step in zip(SIDES, steps, strict=True)}
    return found


def on_ranks(options: argparse.Namespace) -> dict[str, Any]:
    return {name: compare(options, getattr(torch, name)) for name in options.dtype}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="a source tree of DistConv")
    parser.add_argument("--width", type=int, default=128, help="voxels along each side")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="turns of each side")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    options = parser.parse_args()
    where = machine()
    results = run_ranks(options.ranks, on_ranks, options)[0]
    for name, result in results.items():
        print(f"cosmoflow-{options.width}, {name}, forward and backward:", result["losses"])
        for key, row in result.items():
            if key != "losses":
                print(f"{key:24} best {row['min']:.3f}  median {row['median']:.3f}")
    if options.json:
        what = {"width": options.width, "ranks": options.ranks, "steps": options.steps}
        options.json.write_text(json.dumps({**where, "options": what, **results}, indent=1))


if __name__ == "__main__":
    main()
