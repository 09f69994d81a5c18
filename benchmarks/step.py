"""The distributed step against the serial one on the same cores, in turn, in one process group.

    python benchmarks/step.py [--what steps passes parts time] [--network cosmoflow unet3d]
                              [--width W] [--steps 15] [--dtype float32 bfloat16] [--json OUT]

1. A training step on R ranks of one thread against the same step on one rank of R threads (rank 0,
   while the others sleep in a barrier). On GPUs: R GPUs against one.
2. Layer by layer for CosmoFlow, the distributed convolution against the plain one of the same
   block without communication, on all ranks at once: the share of the kernel's speed that is
   reached (Oyama et al. 2020, table II), and that of the fastest kernels there are for the block.
3. ``--what passes``: every convolution of a whole sample, pass by pass (Mathuriya et al. 2018,
   table I). ``--what parts``: table II at 2, 8 and 32 parts, by one rank's block where there are
   fewer ranks. ``--what time``: a step's time by what it is spent on (their figure 3).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from categories import measure_categories, print_categories
from clock import machine, slowest, summary, write_results
from convolution_shares import compare_convolutions, print_convolutions
from launch import run_ranks
from networks import NETWORKS, OURS, PARTS, Step, make_case
from passes import measure_parts, measure_passes, print_parts, print_passes

import hyperslab as hs

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
    for parts in options.parts if "parts" in options.what else ():
        width = options.width or WIDTH_OF_PARTS[parts]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = list(NETWORKS)
    kinds = ("steps", *PRINTERS)
    parser.add_argument("--what", nargs="+", choices=kinds, default=["steps"])
    parser.add_argument("--network", nargs="+", choices=names, default=OURS)
    parser.add_argument("--width", type=int, help="voxels along each side")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--parts",
        type=int,
        nargs="+",
        choices=WIDTH_OF_PARTS,
        default=list(WIDTH_OF_PARTS),
        help="of --what parts; 8 parts take 12 GiB a rank in float32",
    )
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
    write_results(options, where, results)


if __name__ == "__main__":
    main()
