"""Memory and reading per rank: what a step saves and takes, bytes that a sample costs to read.

    python benchmarks/memory.py [--network cosmoflow unet3d ...] [--width W] [--ranks 2 4 8]
                                [--batch-norm] [--what saved peak read] [--json OUT]

1. Bytes saved for backward on the worst rank against 1.05 (other networks than CosmoFlow: 1.08) x
   serial / ranks + halos. The halos are computed from the windows alone.
2. The most memory that a rank's process takes in training (Adam), serial against cut, each side in
   fresh processes.
3. Bytes that each rank reads of each sample, as the reader and as the operating system count
   them, against its box and against the whole sample.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from clock import machine, write_results
from launch import run_ranks
from networks import NETWORKS
from resident import peak_memory
from saved import GRIDS, saved_bytes

import hyperslab as hs
from hyperslab.data.assemble import os_bytes_read

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
    rows: dict[int, dict[str, Any]] = {}
    for ranks in (1, *options.ranks):
        found = run_ranks(ranks, saved_bytes, network, width, options.batch_norm, GRIDS[ranks])
        worst = max(found, key=lambda rank: rank["saved"] - rank["halos"])
        share = bar = None
        if ranks > 1:
            serial = rows[1]["saved"]
            bar = SLACK.get(network, USUAL_SLACK) * serial / ranks + worst["halos"]
            share = worst["saved"] * ranks / serial
        rows[ranks] = {"grid": GRIDS[ranks], "width": width, "bar": bar, "share": share, **worst}
    return rows


def peak(network: str, options: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """What training takes on one, then on several ranks; the worst rank of each."""
    width = options.width or NETWORKS[network]
    rows: dict[int, dict[str, Any]] = {}
    for ranks in (1, *options.ranks):
        found = run_ranks(ranks, peak_memory, network, width, options.batch_norm, GRIDS[ranks])
        worst = max(found, key=lambda rank: rank["step"])
        share = worst["step"] * ranks / rows[1]["step"] if ranks > 1 else None
        rows[ranks] = {"grid": GRIDS[ranks], "width": width, "share": share, **worst}
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


def print_memory(results: dict[str, Any], options: argparse.Namespace) -> None:
    """One table of what is saved, against serial torch's / ranks, and of the peaks."""
    kinds = [kind for kind in ("saved", "peak") if kind in options.what]
    print("\nmemory of the worst rank [MiB]; share: of the serial run's / ranks")
    titles = {
        "saved": f"{'saved':>10}{'share':>8}{'halos':>8}{'of its bar':>12}",
        "peak": f"{'training':>10}{'share':>8}{'process':>9}",
    }
    print(f"{'':18}{'ranks':>6}{'grid':>12}" + "".join(titles[kind] for kind in kinds))
    for network in options.network:
        rows = {kind: results[network][kind] for kind in kinds}
        for ranks, row in rows[kinds[0]].items():
            title = f"{network}-{row['width']}" if ranks == 1 else ""
            columns = "".join(_COLUMNS[kind](rows[kind][ranks]) for kind in kinds)
            print(f"{title:18}{ranks:6}{grid_of(row):>12}{columns}")


def _saved_columns(row: dict[str, Any]) -> str:
    if row["bar"] is None:
        return f"{row['saved'] / MIB:10.2f}{'':28}"
    numbers = f"{row['saved'] / MIB:10.2f}{row['share']:8.3f}{row['halos'] / MIB:8.2f}"
    return f"{numbers}{row['saved'] / row['bar']:12.3f}"


def _peak_columns(row: dict[str, Any]) -> str:
    share = f"{'':8}" if row["share"] is None else f"{row['share']:8.3f}"
    return f"{row['step'] / MIB:10.1f}{share}{row['process'] / MIB:9.1f}"


_COLUMNS = {"saved": _saved_columns, "peak": _peak_columns}


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
    kinds = ["saved", "peak", "read"]
    parser.add_argument("--what", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--batch-norm", action="store_true", help="in CosmoFlow")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    options = parser.parse_args()
    where = machine()
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    print("float32, one sample")
    results: dict[str, Any] = {}
    measures = {"saved": saved, "peak": peak}
    wanted = {kind: measure for kind, measure in measures.items() if kind in options.what}
    for network in options.network:
        results[network] = {kind: measure(network, options) for kind, measure in wanted.items()}
    if wanted:
        print_memory(results, options)
    if "read" in options.what:
        results["read"] = read(options)
        print_read(results["read"])
    write_results(options, where, results)


if __name__ == "__main__":
    main()
