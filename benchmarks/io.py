"""Reading: bytes against boxes, speed against one plain read, and training that is fed by it.

    python benchmarks/io.py [--part bytes speed feed scale sums open threads] [--side 256 512]
                            [--kind chunked plain] [--turns 5] [--folder build/io]
                            [--width 128] [--ranks 1 2] [--threads 1 2] [--json OUT] [--plot OUT]

Files of the public layout are made once, in chunks and in one piece.

1. bytes: what each rank reads of a sample, as the data set and the operating system count it.
2. speed: boxes read by 2 ranks against one process that reads the same files from front to back,
   and against ranks that read whole samples and send each other boxes; from disk and from memory.
3. feed: CosmoFlow on 2 ranks with data from files, from the store, and already on the device.
4. scale: a step against ranks, where each reads its box and where one reads for all of them, from
   files and from their stores (Oyama et al. 2020, figure 5).
5. sums: files whose chunks have checksums against files without, read by one process.
6. open: folders of files, opened with all checks of their headers and by h5py alone.
7. threads: epochs of one process that reads with one thread and with several, by format.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import h5py
from checksums import opening, print_opening, print_sums, sums
from clock import machine, write_results
from feeding import feed
from launch import run_ranks
from plot import draw
from reading import CUTS, SAMPLES, read_bytes, speeds
from scattering import step_times
from side_by_side import print_side_by_side, side_by_side
from volumes import KINDS, make

MIB = 2**20
GB = 1e9
PARTS = ("bytes", "speed", "feed", "scale", "sums", "open", "threads")
EPOCH = 8
"""Samples of an epoch where a step is timed."""

WAYS = {
    "plain": "one process, plain read",
    "library": "one process, h5py",
    "depth": "boxes, cut in depth",
    "height": "boxes, cut in height",
    "width": "boxes, cut in width",
    "ready": "boxes (depth), as the store keeps them",
    "scattered": "whole samples, scattered (depth)",
}


def count(folder: Path) -> list[dict[str, Any]]:
    """For each cut the worst rank."""
    rows = []
    for cut in CUTS:
        found = run_ranks(math.prod(cut.values()), read_bytes, str(folder), cut)
        rows.append({"cut": cut, **max(found, key=lambda rank: rank["system"] / rank["box"])})
    return rows


def print_bytes(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}: a sample's bytes per rank, worst rank")
    print(f"{'cut':30}{'box [MiB]':>10}{'data set':>10}{'system':>10}   of the box")
    for row in rows:
        cut = ", ".join(f"{axis} {n}" for axis, n in row["cut"].items())
        shares = "".join(f"{row[by] / row['box']:10.4f}" for by in ("program", "system"))
        print(f"{cut:30}{row['box'] / MIB:10.1f}{shares}")


def print_speeds(title: str, result: dict[str, Any]) -> None:
    for cache in ("cold", "warm"):
        rows = result[cache]
        print(f"\n{title}: {SAMPLES} samples, {cache} page cache, 2 ranks")
        print(f"{'':40}{'[GB/s]':>16}{'ratio':>16}{'from':>8}")
        print(f"{'':40}{'best':>8}{'median':>8}{'best':>8}{'paired':>8}{'disk':>8}")
        for name, words in WAYS.items():
            speed, ratio, disk = (rows[name][key] for key in ("speed", "ratio", "disk"))
            print(
                f"{words:40}{speed['max'] / GB:8.2f}{speed['median'] / GB:8.2f}"
                f"{speed['max'] / rows['plain']['speed']['max']:8.2f}{ratio['median']:8.2f}"
                f"{disk['median']:8.2f}"
            )


def print_feed(title: str, result: dict[str, Any]) -> None:
    box = result["box"] / MIB
    print(f"\n{title}, 2 ranks, epochs of {result['steps']} steps, boxes of {box:.1f} MiB")
    print(
        f"{'':16}{'step [ms]':>16}{'ratio':>8}{'wait':>8}{'of the':>8}{'all ranks read [MiB]':>30}"
    )
    print(
        f"{'':16}{'best':>8}{'median':>8}{'paired':>8}{'[ms]':>8}{'step':>8}"
        f"{'data set':>10}{'system':>10}{'disk':>10}"
    )
    for name, row in result["ways"].items():
        seconds = row["seconds"]
        wait = row["wait"]["median"]
        read = "".join(f"{row[by]['median'] / MIB:10.3f}" for by in ("program", "system", "disk"))
        print(
            f"{name:16}{1e3 * seconds['min']:8.1f}{1e3 * seconds['median']:8.1f}"
            f"{row['ratio']['median']:8.3f}{1e3 * wait:8.2f}{wait / seconds['median']:8.2%}{read}"
        )


def print_scale(title: str, rows: dict[str, Any]) -> None:
    print(f"\n{title}: a step [ms] where ...")
    words = ("each reads its box", "one reads and sends", "boxes in stores", "samples in stores")
    print(f"{'':8}" + "".join(f"{way:>30}" for way in words))
    print(f"{'ranks':8}" + f"{'best':>14}{'median':>8}{'wait':>8}" * len(words))
    for ranks, row in rows.items():
        cells = [
            f"{1e3 * way['seconds']['min']:14.1f}{1e3 * way['seconds']['median']:8.1f}"
            f"{1e3 * way['wait']['median']:8.1f}"
            for way in row.values()
        ]
        print(f"{ranks:8}" + "".join(cells))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All parts that are asked for, printed as they come."""
    results: dict[str, Any] = {}
    for side in options.side if {"bytes", "speed"} & {*options.part} else ():
        for kind in options.kind:
            title = f"{side}-{kind}"
            folder = make(options.folder, side, kind, SAMPLES)
            results[title] = {}
            if "bytes" in options.part:
                results[title]["bytes"] = count(folder)
                print_bytes(title, results[title]["bytes"])
            if "speed" in options.part:
                results[title]["speed"] = run_ranks(2, speeds, str(folder), options.turns)[0]
                print_speeds(title, results[title]["speed"])
    if "feed" in options.part:
        folder = make(options.folder / "cube", 2 * options.width, "chunked", 1)
        found = run_ranks(2, feed, str(folder), options.width, options.turns)[0]
        results["feed"] = {"width": options.width, **found}
        print_feed(f"CosmoFlow-{options.width}", results["feed"])
    if "scale" in options.part:
        folder = make(options.folder / "epoch", 256, "plain", EPOCH)
        results["scale"] = {
            str(n): run_ranks(n, step_times, str(folder), options.turns)[0] for n in options.ranks
        }
        print_scale(f"256-plain, cold page cache, epochs of {EPOCH} steps", results["scale"])
    for side in options.side if "sums" in options.part else ():
        results[f"{side}-sums"] = sums(options.folder, side, options.turns)
        print_sums(side, results[f"{side}-sums"])
    if "open" in options.part:
        results["open"] = opening(options.folder, (1, 16, 256), options.turns)
        print_opening(results["open"])
    for side in options.side if "threads" in options.part else ():
        found = side_by_side(options.folder, side, options.turns, options.threads)
        results[f"{side}-threads"] = found
        print_side_by_side(side, found)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--side", type=int, nargs="+", default=[256, 512], help="voxels")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="of files")
    parser.add_argument("--turns", type=int, default=5, help="of each way of reading")
    parser.add_argument("--folder", type=Path, default=Path("build/io"), help="for the files")
    parser.add_argument("--width", type=int, default=128, help="of CosmoFlow")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="that are scaled to")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="that read")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw the scaling there")
    options = parser.parse_args()
    where = machine() | {"h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version}
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    results = measure(options)
    write_results(options, where, results)
    if options.plot:
        draw(results["scale"], where, options.plot)


if __name__ == "__main__":
    main()
