"""Memory and reading per rank: activations that a step saves, bytes that a sample costs to read.

    python benchmarks/memory.py [--network cosmoflow unet3d ...] [--width W] [--ranks 2 4 8]
                                [--batch-norm] [--json OUT]

1. Bytes saved for backward on the worst rank against 1.05 (U-Net: 1.08) x serial / ranks + halos.
   The halos are computed from the windows alone.
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
from networks import NETWORKS
from saved import GRIDS, saved_bytes

import hyperslab as hs
from hyperslab.data.reader import os_bytes_read

MIB = 2**20
SAMPLES = 3
SLACK = {"cosmoflow": 1.05}
USUAL_SLACK = 1.08


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


def epoch_bytes(folder: str, axes: dict[str, int]) -> dict[str, int]:
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


def saved(network: str, options: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """What a step saves on one, then on several ranks; the worst rank of each."""
    width = options.width or NETWORKS[network]
    rows = {}
    for ranks in (1, *options.ranks):
        found = run_ranks(ranks, saved_bytes, network, width, options.batch_norm, GRIDS[ranks])
        worst = max(found, key=lambda rank: rank["saved"] - rank["halos"])
        bar = (
            SLACK.get(network, USUAL_SLACK) * rows[1]["saved"] / ranks + worst["halos"]
            if ranks > 1
            else None
        )
        rows[ranks] = {"grid": GRIDS[ranks], "width": width, "bar": bar, **worst}
    return rows


def read(options: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """What the ranks read of universes; the worst rank of each number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        write_universes(Path(folder), options.width or NETWORKS["cosmoflow"])
        found = {n: run_ranks(n, epoch_bytes, folder, GRIDS[n]) for n in (1, *options.ranks)}
    return {
        ranks: {"grid": GRIDS[ranks], **max(rows, key=lambda rank: rank["read"])}
        for ranks, rows in found.items()
    }


def grid_of(row: dict[str, Any]) -> str:
    return " x ".join(str(row["grid"].get(axis, 1)) for axis in ("depth", "height", "width"))


def print_saved(network: str, rows: dict[int, dict[str, Any]]) -> None:
    print(f"\n{network}, {rows[1]['width']} voxels along each side: saved for backward [MiB]")
    print(f"{'ranks':>5}{'grid':>12}{'rank':>10}{'halos':>8}{'bar':>10}{'share':>8}")
    for ranks, row in rows.items():
        line = f"{ranks:5}{grid_of(row):>12}{row['saved'] / MIB:10.2f}{row['halos'] / MIB:8.2f}"
        bar = row["bar"]
        print(line if bar is None else f"{line}{bar / MIB:10.2f}{row['saved'] / bar:8.3f}")


def print_read(rows: dict[int, dict[str, Any]]) -> None:
    print("\nread per sample [MiB]")
    print(f"{'ranks':>5}{'grid':>12}{'rank':>10}{'system':>10}{'box':>9}{'whole':>9}")
    for ranks, row in rows.items():
        print(
            f"{ranks:5}{grid_of(row):>12}{row['read'] / MIB:10.3f}{row['system'] / MIB:10.3f}"
            f"{row['box'] / MIB:9.3f}{row['whole'] / MIB:9.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = list(NETWORKS)
    parser.add_argument("--network", nargs="+", choices=names, default=names)
    parser.add_argument("--width", type=int, help="voxels along each side")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], choices=[2, 4, 8])
    parser.add_argument("--batch-norm", action="store_true", help="in CosmoFlow")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    options = parser.parse_args()
    where = machine()
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    print("float32, one sample")
    results: dict[str, Any] = {}
    for network in options.network:
        results[network] = saved(network, options)
        print_saved(network, results[network])
    results["read"] = read(options)
    print_read(results["read"])
    if options.json:
        what = {key: str(value) for key, value in vars(options).items() if key != "json"}
        options.json.write_text(json.dumps({**where, "options": what, **results}, indent=1))


if __name__ == "__main__":
    main()
