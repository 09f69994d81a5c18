"""The distributed step against the serial one on the same cores, in turn, in one process group.

    python benchmarks/step.py [--what steps passes parts time] [--network cosmoflow unet3d]
                              [--width W] [--steps 15] [--dtype float32 bfloat16] [--json OUT]

1. A training step on R ranks of one thread against the same step on one rank of R threads (rank 0,
   while the others sleep in a barrier). On GPUs: R GPUs against one.
2. Layer by layer for CosmoFlow, the distributed convolution against the plain one of the same
   block without communication, on all ranks at once: the share of the kernel's speed that is
   reached (Oyama et al. 2020, table II).
3. ``--what passes``: every convolution of a whole sample, pass by pass (Mathuriya et al. 2018,
   table I). ``--what parts``: table II at 2, 8 and 32 parts, by one rank's block where there are
   fewer ranks. ``--what time``: a step's time by what it is spent on (their figure 3).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from categories import measure_categories, print_categories
from clock import machine, slowest, stopwatch, summary
from launch import run_ranks
from networks import NETWORKS, OURS, PARTS, Step, make_case
from passes import measure_parts, measure_passes, print_parts, print_passes
from torch import nn

import hyperslab as hs
from hyperslab.geometry import Partition

WARM_UP = 3
WIDTH_OF_PARTS = {2: 256, 8: 512, 32: 512}
"""Voxels along each side of the sample; 512, cut 8 and 32 ways along depth, is the paper's."""
SHORT = 3
"""Turns of what takes seconds."""


def compare_steps(
    network: str, width: int, ranks: int, steps: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Serial and distributed steps in turn; on every rank."""
    grid = hs.Grid(depth=ranks)
    serial = Step(make_case(network, width, False, grid.device), dtype) if grid.is_main else None
    case = make_case(network, width, False, grid.device)
    case.cut(grid)
    cut = Step(case, dtype)
    turns = []
    for _ in range(WARM_UP + steps):
        alone, busy = serial_turn(serial, grid, ranks)
        grid.barrier()
        together = slowest(cut.run(), grid.device)
        turns.append({"serial": alone, "distributed": together, "busy": busy})
    result = report(turns[WARM_UP:])
    if serial is not None:
        result["losses"] = [serial.loss.item(), cut.loss.item()]
    return result


def serial_turn(serial: Step | None, grid: hs.Grid, threads: int) -> tuple[list[float], float]:
    """Times of the serial step on rank 0; the share of a core the waiting ranks use."""
    grid.barrier()
    wall = time.perf_counter()
    used = time.process_time()
    seconds = [0.0] * len(PARTS)
    if serial is not None:
        torch.set_num_threads(threads)
        seconds = serial.run()
        torch.set_num_threads(1)
    grid.barrier()
    busy = (time.process_time() - used) / (time.perf_counter() - wall)
    *seconds, busy = slowest([*seconds, 0.0 if grid.is_main else busy], grid.device)
    return seconds, busy


def report(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each side, and the median of the ratios of neighbouring turns."""
    parts = {name: slice(i, i + 1) for i, name in enumerate(PARTS)}
    parts |= {"step": slice(0, 2), "step and optimiser": slice(0, 3)}
    table = {}
    for name, span in parts.items():
        alone = [sum(t["serial"][span]) for t in turns]
        together = [sum(t["distributed"][span]) for t in turns]
        ratios = [b / a for a, b in zip(alone, together, strict=True)]
        table[name] = {
            "serial": summary(alone),
            "distributed": summary(together),
            "ratio": summary(ratios),
        }
    return {"parts": table, "busy": summary([t["busy"] for t in turns])}


def compare_convolutions(
    width: int, ranks: int, steps: int, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Every convolution of the network, forward and backward, as it lies there; on every rank."""
    grid = hs.Grid(depth=ranks)
    layers: list[tuple[str, nn.Conv3d, Partition]] = []
    features = hs.models.CosmoFlow(width).to(grid.device).features
    for name, module in features.named_children():
        if isinstance(module, nn.Conv3d):
            module.register_forward_pre_hook(
                lambda layer, args, name=name: layers.append((name, layer, args[0].partition))
            )
    with torch.no_grad():
        features(hs.shard(torch.zeros(1, 4, width, width, width, device=grid.device), grid))
    return [
        {"layer": name, **compare_layer(layer, partition, i > 0, grid, steps, dtype)}
        for i, (name, layer, partition) in enumerate(layers)
    ]


def compare_layer(
    layer: nn.Conv3d,
    partition: Partition,
    needs_dx: bool,
    grid: hs.Grid,
    steps: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """One convolution of one input, plain and distributed in turn, on all ranks at once."""
    block = torch.randn(
        partition.box(grid.coords).shape, device=grid.device, dtype=dtype, requires_grad=needs_dx
    )
    cut = hs.Sharded.from_local(block, partition, grid)
    weight = torch.randn(layer.weight.shape, device=grid.device, dtype=dtype, requires_grad=True)
    plain = Convolution(layer, block, weight)
    distributed = Convolution(layer, cut, weight)
    flops = weight.numel() * block.numel() / block.shape[1]
    turns = []
    for _ in range(WARM_UP + steps * min(10, 1 + int(1e9 / flops))):  # short ones more often
        both = []
        for side in (plain, distributed):
            grid.barrier()
            both.append(slowest(side.run(), grid.device))
        turns.append(both)
    turns = turns[WARM_UP:]
    shares = [sum(a) / sum(b) for a, b in turns]
    sides = {
        side: {
            name: summary([t[i][part] for t in turns])
            for part, name in enumerate(("forward", "backward"))
        }
        for i, side in enumerate(("plain", "distributed"))
    }
    cut_along = ", ".join(cut.axis for cut in partition.cuts if cut is not None)
    return {"input": list(partition.shape), "cut": cut_along, "share": summary(shares), **sides}


class Convolution:
    """A convolution to be timed."""

    def __init__(self, layer: nn.Conv3d, x: Any, weight: torch.Tensor) -> None:
        self.layer = layer
        self.x = x
        self.weight = weight
        self.gradient: torch.Tensor | None = None

    def forward(self) -> None:
        y = F.conv3d(self.x, self.weight, None, self.layer.stride, self.layer.padding)
        self.y = y.local if isinstance(y, hs.Sharded) else y

    def backward(self) -> None:
        if self.gradient is None:
            self.gradient = torch.randn_like(self.y)
        self.y.backward(self.gradient)

    def run(self) -> list[float]:
        return stopwatch(self.weight.device, [self.forward, self.backward])


def on_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Whatever is asked for."""
    results: dict[str, Any] = steps_of(options) if "steps" in options.what else {}
    found = [tables_of(name, options) for name in options.dtype]
    return results | {"tables": [table for tables in found for table in tables]}


def steps_of(options: argparse.Namespace) -> dict[str, Any]:
    """Every network in every dtype."""
    results: dict[str, Any] = {}
    for network in options.network:
        width = options.width or NETWORKS[network]
        results[network] = {"width": width}
        for name in options.dtype:
            common = (width, options.ranks, options.steps, getattr(torch, name))
            results[network][name] = {"step": compare_steps(network, *common)}
            if network == "cosmoflow":
                results[network][name]["convolutions"] = compare_convolutions(*common)
    return results


def tables_of(dtype_name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The papers' tables in a dtype, each with a title and its rows."""
    dtype = getattr(torch, dtype_name)
    ranks = options.ranks
    tables = []
    for variant in ("sc18", "paper2020") if "passes" in options.what else ():
        width = NETWORKS["cosmoflow"]  # the only one that sc18 takes
        title = f"{variant}-{width}, {dtype_name}: plain convolutions, {ranks} threads"
        alone = dist.get_rank() == 0
        rows = measure_passes(width, variant, options.steps, dtype, ranks) if alone else []
        tables.append({"what": "passes", "title": title, "rows": rows})
        dist.barrier()
    for parts, usual in WIDTH_OF_PARTS.items() if "parts" in options.what else ():
        width = options.width or usual
        with_whom = "all there" if parts == ranks else f"one rank's block on each of {ranks} ranks"
        title = f"CosmoFlow-{width}, {dtype_name}: {parts} parts of depth, {with_whom}"
        rows = measure_parts(parts, width, SHORT, dtype, ranks)
        tables.append({"what": "parts", "title": title, "rows": rows})
    for network in options.network if "time" in options.what else ():
        width = options.width or NETWORKS[network]
        title = f"{network}-{width}, {dtype_name}: a step of rank 0 of {ranks}, by category"
        rows = measure_categories(network, width, ranks, options.steps, dtype)
        tables.append({"what": "time", "title": title, "rows": rows})
    return tables


PRINTERS = {"passes": print_passes, "parts": print_parts, "time": print_categories}


def print_step(name: str, result: dict[str, Any], ranks: int) -> None:
    print(f"\n{name}: {ranks} ranks x 1 thread against 1 rank x {ranks} threads")
    print(f"{'':20}{'serial [ms]':>18}{'distributed [ms]':>18}{'ratio':>16}{'ratios':>14}")
    print(f"{'':20}{'best':>9}{'median':>9}{'best':>9}{'median':>9}{'best':>8}{'paired':>8}")
    for part, row in result["parts"].items():
        serial = row["serial"]
        cut = row["distributed"]
        ratio = row["ratio"]
        print(
            f"{part:20}{1e3 * serial['min']:9.1f}{1e3 * serial['median']:9.1f}"
            f"{1e3 * cut['min']:9.1f}{1e3 * cut['median']:9.1f}{cut['min'] / serial['min']:8.3f}"
            f"{ratio['median']:8.3f}{ratio['min']:8.2f} to {ratio['max']:.2f}"
        )
    print(f"a waiting rank used {100 * result['busy']['median']:.1f} % of a core")
    print("last losses: serial {:.6g}, distributed {:.6g}".format(*result["losses"]))


def print_convolutions(name: str, rows: list[dict[str, Any]], ranks: int) -> None:
    print(f"\n{name}: plain convolution of the block against the distributed one, {ranks} ranks")
    print(f"{'':34}{'plain [ms]':>18}{'distributed [ms]':>18}{'share':>16}")
    print(
        f"{'layer':8}{'input':>26}{'best':>9}{'median':>9}{'best':>9}{'median':>9}"
        f"{'best':>8}{'paired':>8}"
    )
    sides = ("plain", "distributed")
    totals = {(side, kind): 0.0 for side in sides for kind in ("min", "median")}
    for row in rows:
        times = {
            (side, kind): sum(part[kind] for part in row[side].values()) for side, kind in totals
        }
        totals = {key: totals[key] + times[key] for key in totals}
        shape = " x ".join(map(str, row["input"][1:])) + ("" if row["cut"] else " (whole)")
        print_shares(f"{row['layer']:8}{shape:>26}", times, row["share"]["median"])
    print_shares(f"{'all':34}", totals, totals["plain", "median"] / totals["distributed", "median"])


def print_shares(label: str, times: dict[tuple[str, str], float], paired: float) -> None:
    columns = "".join(f"{1e3 * t:9.2f}" for t in times.values())
    best = times["plain", "min"] / times["distributed", "min"]
    print(f"{label}{columns}{best:8.3f}{paired:8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = list(NETWORKS)
    kinds = ("steps", *PRINTERS)
    parser.add_argument("--what", nargs="+", choices=kinds, default=["steps"])
    parser.add_argument("--network", nargs="+", choices=names, default=OURS)
    parser.add_argument("--width", type=int, help="voxels along each side")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15, help="turns of each side")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    options = parser.parse_args()
    where = machine()
    results = run_ranks(options.ranks, on_ranks, options)[0]
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    for network in options.network if "steps" in options.what else ():
        result = results[network]
        for name in options.dtype:
            title = f"{network}-{result['width']}, {name}"
            print_step(title, result[name]["step"], options.ranks)
            if "convolutions" in result[name]:
                print_convolutions(title, result[name]["convolutions"], options.ranks)
    for table in results["tables"]:
        PRINTERS[table["what"]](table["title"], table["rows"])
    if options.json:
        what = {key: str(value) for key, value in vars(options).items() if key != "json"}
        options.json.write_text(json.dumps({**where, "options": what, **results}, indent=1))


if __name__ == "__main__":
    main()
