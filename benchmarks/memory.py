"""Memory and reading per rank: activations that a step saves, bytes that a sample costs to read.

    python benchmarks/memory.py [--width 128] [--ranks 2 4 8] [--batch-norm] [--json OUT]

1. Bytes saved for backward on the worst rank against 1.05 x serial / ranks + halos. The halos are
   computed from the windows alone.
2. Bytes that each rank reads of each sample, as the reader and as the operating system count
   them, against its box and against the whole sample.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from clock import machine
from launch import run_ranks
from saved import GRIDS, saved_bytes

import hyperslab as hs
from hyperslab.data.reader import os_bytes_read

MIB = 2**20
SAMPLES = 3


def write_universes(folder: Path, width: int) -> None:
    """Random counts in the public layout, in chunks of one eighth of the width."""
    random = np.random.default_rng(0)
    for i in range(SAMPLES):
        with h5py.File(folder / f"univ_ics_{i}.hdf5", "w") as file:
            counts = random.poisson(1.0, (width, width, width, 4)).astype(np.int16)
            file.create_dataset("full", data=counts, chunks=(max(1, width // 8),) * 3 + (4,))
            file["unitPar"] = random.uniform(-1, 1, 4)
            file["physPar"] = file["unitPar"][:] * [0.1, 0.1, 0.1, 0.1] + [0.3, 0.8, 0.96, 0.7]
            file["namePar"] = np.array(["Om_m", "sigma_8", "N_spec", "H_0"], dtype="S10")
            file["redshifts"] = np.array([3.0, 1.5, 0.5, 0.0])


def read_bytes(folder: str, axes: dict[str, int]) -> dict[str, int]:
    """Bytes per sample that this rank reads, and those of its box and of the whole."""
    grid = hs.Grid(**axes)
    with hs.open(folder, grid, batch_size=1, split="all", prefetch=0) as data:
        before = os_bytes_read()
        for x, _ in data.epoch(0):
            box = x.box
        system = (os_bytes_read() - before) // len(data)
        whole = 2 * int(np.prod(data.shape))  # int16
        read = data.bytes_read // len(data)
        return {"read": read, "system": system, "box": 2 * box.size, "whole": whole}


def measure(options: argparse.Namespace, ranks: int, folder: str) -> dict[str, Any]:
    """Both measurements on one number of ranks, the worst rank of each."""
    axes = GRIDS[ranks]
    saved = run_ranks(ranks, saved_bytes, options.width, options.batch_norm, axes)
    worst = max(saved, key=lambda rank: rank["saved"] - rank["halos"])
    reads = run_ranks(ranks, read_bytes, folder, axes)
    return {"grid": axes, **worst, **max(reads, key=lambda rank: rank["read"])}


def print_table(rows: dict[int, dict[str, Any]]) -> None:
    serial = rows[1]["saved"]
    print(f"\n{'':17}{'saved for backward [MiB]':>36}{'read per sample [MiB]':>38}")
    print(
        f"{'ranks':>5}{'grid':>12}{'rank':>10}{'halos':>8}{'bar':>10}{'share':>8}"
        f"{'rank':>10}{'system':>10}{'box':>9}{'whole':>9}"
    )
    for ranks, row in rows.items():
        bar = 1.05 * serial / ranks + row["halos"]
        grid = " x ".join(str(row["grid"].get(axis, 1)) for axis in ("depth", "height", "width"))
        print(
            f"{ranks:5}{grid:>12}{row['saved'] / MIB:10.2f}{row['halos'] / MIB:8.2f}"
            f"{bar / MIB:10.2f}{row['saved'] / bar:8.3f}{row['read'] / MIB:10.3f}"
            f"{row['system'] / MIB:10.3f}{row['box'] / MIB:9.3f}{row['whole'] / MIB:9.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=128, help="voxels along each side")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], choices=[2, 4, 8])
    parser.add_argument("--batch-norm", action="store_true")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    options = parser.parse_args()
    where = machine()
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    print(f"CosmoFlow-{options.width}, batch norm: {options.batch_norm}, float32, one sample")
    with tempfile.TemporaryDirectory() as folder:
        write_universes(Path(folder), options.width)
        rows = {ranks: measure(options, ranks, folder) for ranks in [1, *options.ranks]}
    print_table(rows)
    if options.json:
        what = {key: str(value) for key, value in vars(options).items() if key != "json"}
        options.json.write_text(json.dumps({**where, "options": what, "ranks": rows}, indent=1))


if __name__ == "__main__":
    main()
