"""What the comparison of samples in `hyperslab.shard` costs: steps with it and without, in turn.

    python benchmarks/shard_check.py [--network cosmoflow] [--width 128] [--ranks 2] [--steps 15]
                                     [--dtype float32 bfloat16] [--json OUT]

A step cuts a whole sample that lies in memory, trains on it and updates the parameters. The time of
the cut alone is given, too: in it is a copy of the own block.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from clock import machine, slowest, stopwatch, summary
from launch import run_ranks
from networks import OURS, Step, make_case

import hyperslab as hs
from hyperslab.comm import AXES

WARM_UP = 3


def compare(network: str, width: int, ranks: int, steps: int, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds of the slowest rank: of the cut and of the step with it; on every rank."""
    grid = hs.Grid(depth=ranks)
    case = make_case(network, width, False, grid.device)
    whole = case.x
    case.cut(grid)
    step = Step(case, dtype)
    turns: dict[bool, list[list[float]]] = {True: [], False: []}
    for number in range(2 * (WARM_UP + steps)):
        check = number % 2 == 0

        def cut(check: bool = check) -> None:
            case.x = hs.shard(whole, grid, check=check)

        meet(grid)
        seconds = slowest(stopwatch(grid.device, [cut, step.run]), grid.device)
        turns[check].append([seconds[0], sum(seconds)])
    kept = {check: found[WARM_UP:] for check, found in turns.items()}
    pairs = list(zip(kept[True], kept[False], strict=True))
    return {
        "cut": summary([turn[0] for turn in kept[False]]),
        "cut and compared": summary([turn[0] for turn in kept[True]]),
        "step": summary([turn[1] for turn in kept[False]]),
        "step, compared": summary([turn[1] for turn in kept[True]]),
        "cost [s]": statistics.median(a[0] - b[0] for a, b in pairs),
        "ratio of steps": statistics.median(a[1] / b[1] for a, b in pairs),
    }


def meet(grid: hs.Grid) -> None:
    """Closer together than by a barrier over sockets: the comparison waits for the last rank."""
    everybody = grid.group(AXES)
    if everybody is not None:
        everybody.sum_in_place(torch.zeros(1, device=grid.device), "a barrier")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=OURS, default="cosmoflow")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    result: dict[str, Any] = {"machine": machine()}
    for name in asked.dtype:
        dtype = getattr(torch, name)
        network = asked.network
        found = run_ranks(
            asked.ranks, compare, network, asked.width, asked.ranks, asked.steps, dtype
        )
        result[name] = found[0]
        step = found[0]["step"]["median"]
        share = found[0]["cost [s]"] / step
        print(f"{name}: step {step:.4f} s, comparison {found[0]['cost [s]'] * 1e3:.2f} ms", end="")
        print(f" = {share:.2%} of it; step with / without {found[0]['ratio of steps']:.4f}")
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
