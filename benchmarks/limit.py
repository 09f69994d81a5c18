"""A step as a multiple of its limit: its convolution passes alone, each by the fastest kernel.

    python benchmarks/limit.py [--network cosmoflow unet3d segresnet dynunet resnet] [--width W]
                               [--dtype float32 bfloat16] [--grid depth=2] [--turns 8] [--json OUT]

Three things take turns in one process group (batch 1, one thread a rank):

1. The serial step: plain torch on rank 0, with as many threads as there are ranks.
2. The step over the ranks, forward and backward, without the optimiser.
3. Every pass (forward, weight gradient, input gradient unless nobody wants it) of every
   convolution and transposed convolution of that step, on this rank's block, plain and without
   communication, with every kernel near the fastest (`block_kernels`), on all ranks at once. Shapes
   that occur more often are measured once a turn. Operands lie ready: conversions are not counted.

The limit is the sum of 3, each pass with torch's fastest kernel; a second one counts the library's
own kernels (`own_kernels`), too. At the end one profiled step tells
how long each layer's own operators take in 2.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from block_convolutions import LayerConvolution, convolutions_of
from block_kernels import PASSES, BlockConvolution, operands
from clock import machine, slowest, summary, write_results
from fastest import FastestPass
from launch import run_ranks
from layer_seconds import measure_layers
from networks import NETWORKS, Step, make_case
from own_kernels import is_own
from step import report, serial_turn

import hyperslab as hs

WARM_UP = 2
KINDS = ("min", "median")
"""Of the turns."""


class Limit:
    """The passes of a step's convolutions, each shape once."""

    def __init__(self, layers: Sequence[LayerConvolution], grid: hs.Grid) -> None:
        self.layers = layers
        self.grid = grid
        self.passes: dict[tuple[BlockConvolution, str], FastestPass] = {}
        for block in dict.fromkeys(layer.block for layer in layers):
            given = operands(block)
            for which in block.passes:
                self.passes[block, which] = FastestPass(block, which, given, grid, own=True)

    def turn(self) -> dict[tuple[BlockConvolution, str], dict[str, float]]:
        """Seconds by kernel of every pass, of the slowest rank."""
        mine = {key: timed.run() for key, timed in self.passes.items()}
        flat = iter(slowest([t for times in mine.values() for t in times], self.grid.device))
        return {
            key: {name: next(flat) for name in timed.kernels} for key, timed in self.passes.items()
        }

    def table(self, turns: list[dict[tuple[BlockConvolution, str], dict[str, float]]]) -> Any:
        """By pass and shape, torch's fastest kernel and its seconds, best and median of the turns.

        Under "all" the same with the library's own kernels.
        """
        found = {}
        for key in self.passes:
            of_key = [turn[key] for turn in turns]
            found[key] = {**fastest_of(map(of_torch, of_key)), "all": fastest_of(of_key)}
        return found


def of_torch(times: dict[str, float]) -> dict[str, float]:
    """Without those of the library's own kernels."""
    return {name: seconds for name, seconds in times.items() if not is_own(name)}


def fastest_of(turns: Iterable[dict[str, float]]) -> dict[str, Any]:
    """The kernel with the best time of all turns, and the least median of any."""
    turns = list(turns)
    best = {name: min(turn[name] for turn in turns) for name in turns[0]}
    medians = [statistics.median(turn[name] for turn in turns) for name in turns[0]]
    name = min(best, key=lambda kernel: best[kernel])
    return {"kernel": name, "min": best[name], "median": min(medians)}


def measure(
    network: str, width: int, extents: dict[str, int], dtype: torch.dtype, turns: int
) -> dict[str, Any]:
    """Serial step, step and limit in turn; on every rank."""
    grid = hs.Grid(**extents)
    serial = Step(make_case(network, width, False, grid.device), dtype) if grid.is_main else None
    case = make_case(network, width, False, grid.device)
    case.cut(grid)
    cut = Step(case, dtype)
    cut.run()
    layers = convolutions_of(cut)
    limit = Limit(layers, grid)
    steps = []
    passes = []
    for _ in range(WARM_UP + turns):
        alone, busy = serial_turn(serial, grid, grid.size)
        grid.barrier()
        together = slowest(cut.run(), grid.device)
        steps.append({"serial": alone, "distributed": together, "busy": busy})
        passes.append(limit.turn())
    found = result(layers, limit.table(passes[WARM_UP:]), report(steps[WARM_UP:]))
    for key, own in (("within turns", False), ("within turns, of all kernels", True)):
        found[key] = summary(
            [
                sum(step["distributed"][:2]) / limit_of(layers, turn, own=own)
                for step, turn in zip(steps[WARM_UP:], passes[WARM_UP:], strict=True)
            ]
        )
    seconds = measure_layers(cut, grid, [layer.name for layer in layers])
    for row in found["layers"]:
        row["in the step"] = seconds[row["layer"]]
    return found


def limit_of(layers: Sequence[LayerConvolution], turn: Any, *, own: bool = False) -> float:
    """Seconds of all passes in one turn, each with the kernel that was fastest in it."""
    some = dict if own else of_torch
    return sum(min(some(turn[layer.block, which]).values()) for layer, which in passes_of(layers))


def passes_of(layers: Sequence[LayerConvolution]) -> list[tuple[LayerConvolution, str]]:
    return [(layer, which) for layer in layers for which in layer.block.passes]


def result(layers: Sequence[LayerConvolution], table: Any, steps: dict[str, Any]) -> dict[str, Any]:
    """Rows by layer, and the sums."""
    rows = []
    for layer in layers:
        found = {which: table[layer.block, which] for which in layer.block.passes}
        block = {**asdict(layer.block), "dtype": str(layer.block.dtype)}
        rows.append({"layer": layer.name, "block": block, "passes": found})
    each = [table[layer.block, which] for layer, which in passes_of(layers)]
    sums = {kind: sum(one[kind] for one in each) for kind in KINDS}
    of_all = {kind: sum(one["all"][kind] for one in each) for kind in KINDS}
    step = steps["parts"]["step"]
    multiple = {kind: step["distributed"][kind] / sums[kind] for kind in sums}
    return {
        "limit": sums,
        "limit of all kernels": of_all,
        "multiple": multiple,
        "step": steps,
        "layers": rows,
    }


def on_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Every network in every dtype."""
    found: dict[str, Any] = {}
    for network in options.network:
        width = options.width or NETWORKS[network]
        found[network] = {"width": width}
        for name in options.dtype:
            dtype = getattr(torch, name)
            found[network][name] = measure(network, width, options.grid, dtype, options.turns)
    return found


def print_layers(title: str, found: dict[str, Any]) -> None:
    """Milliseconds and kernel of each pass, and how long the layer takes in the step."""
    print(f"\n{title}: each pass of the block alone, best [ms] and by which kernel")
    columns = "".join(f"{which:>19} " for which in PASSES)
    print(f"{'layer':34}{'block':>20} -> {'':4}{'kernel':9}{columns}", end="")
    print(f"{'in the step':>13}{'multiple':>9}")
    for row in found["layers"]:
        least = sum(one["min"] for one in row["passes"].values())
        columns = "".join(_cell(row["passes"].get(which)) for which in PASSES)
        taken = row["in the step"]
        print(f"{_description(row)}{columns}{1e3 * taken:13.2f}{taken / least:9.2f}")


def _description(row: dict[str, Any]) -> str:
    block = row["block"]
    shape = " x ".join(map(str, block["x"][1:]))
    transposed = block["transposed"]
    kernel = "x".join(map(str, block["weight"][2:])) + ("T" if transposed else "")
    stride = f"/{max(block['stride'])}" if max(block["stride"]) > 1 else ""
    channels = block["weight"][1 if transposed else 0]
    return f"{row['layer'][-33:]:34}{shape:>20} -> {channels:<4}{kernel + stride:9}"


def _cell(found: dict[str, Any] | None) -> str:
    return f"{'':20}" if found is None else f"{1e3 * found['min']:8.2f} {found['kernel']:11}"


def print_sums(results: dict[str, Any], options: argparse.Namespace) -> None:
    """The multiples of the limit, and the ratios to the serial step."""
    milliseconds = f"{'best':>9}{'median':>9}"
    quotient = f"{'best':>8}{'median':>8}{'paired':>8}"
    titles = "".join(f"{side:>18}" for side in ("limit [ms]", "step [ms]", "serial [ms]"))
    print(f"\n{'':22}{titles}{'step / limit':>24}{'step / serial':>24}")
    print(f"{'':22}{milliseconds * 3}{quotient * 2}")
    for network in options.network:
        for name in options.dtype:
            print(f"{network:12}{name:10}{_sums(results[network][name])}")
    print("\nwith the library's own kernels among those of the limit:")
    for network in options.network:
        for name in options.dtype:
            found = results[network][name]
            limit = 1e3 * found["limit of all kernels"]["median"]
            paired = found["within turns, of all kernels"]["median"]
            print(f"{network:12}{name:10}limit {limit:.1f} ms, step / limit {paired:.3f} (paired)")


def _sums(found: dict[str, Any]) -> str:
    step = found["step"]["parts"]["step"]
    sides = (found["limit"], step["distributed"], step["serial"])
    times = "".join(f"{1e3 * side[kind]:9.1f}" for side in sides for kind in KINDS)
    ratios = [step["distributed"][kind] / step["serial"][kind] for kind in KINDS]
    multiples = [*found["multiple"].values(), found["within turns"]["median"]]
    return times + "".join(f"{q:8.3f}" for q in (*multiples, *ratios, step["ratio"]["median"]))


def extents_of(text: str) -> dict[str, int]:
    """Ranks along the axes of a grid, written as ``depth=2,height=1``."""
    pairs = [part.split("=") for part in text.split(",")]
    return {axis: int(count) for axis, count in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = list(NETWORKS)
    parser.add_argument("--network", nargs="+", choices=names, default=names)
    parser.add_argument("--width", type=int, help="voxels along each side")
    parser.add_argument("--grid", type=extents_of, default={"depth": 2}, metavar="depth=2")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    options = parser.parse_args()
    where = machine()
    ranks = math.prod(options.grid.values())
    results = run_ranks(ranks, on_ranks, options)[0]
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    for network in options.network:
        for name in options.dtype:
            print_layers(f"{network}-{results[network]['width']}, {name}", results[network][name])
    print_sums(results, options)
    write_results(options, where, results)


if __name__ == "__main__":
    main()
