"""What grows with the number of ranks, measured with real ones on this machine.

    python benchmarks/many_ranks.py [--ranks 8,16,32,64] [--json OUT]

Every number of ranks (a multiple of 8) meets over TCP, makes a grid of 2 x 2 x 2 ranks a replica,
opens data that keeps its boxes in memory, takes two steps, and writes and loads a checkpoint, in a
fork of this process each. So many ranks share the cores that seconds on a clock say nothing: what
is counted by phase is the processor time of the main rank and the median of the others [s], and
afterwards sockets, threads and private memory [MiB] of a rank.

A line a + b P, fitted by least squares of relative deviations, says what each would be on 2,048
ranks. That is an extrapolation by a factor of 32, and no proof; the worst deviation stands beside.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import hyperslab as hs
from hyperslab.comm.bootstrap import start_ranks, stop_distributed
from hyperslab.data import StorePolicy
from hyperslab.formats.synthetic import SyntheticVolumes
from hyperslab.util.free_memory import free_memory
from hyperslab.util.optional_libraries import current_versions
from hyperslab.util.torch_internals import import_compiler

PHASES = ("meet", "grid", "data", "step", "save", "load")
KEPT = ("sockets", "threads", "private")
FAR = 2048
MARGIN = 1.2  # of memory: more ranks take more each
WIDTH = 16


def main() -> None:
    """Print the table, and what the fits say."""
    options = _options()
    torch.set_num_threads(1)
    import_compiler()  # or each rank would, with its first optimizer
    found = {}
    for count in map(int, options.ranks.split(",")):
        last = [*found.values()][-1]["others"]["private"] if found else 0.0
        if count * MARGIN * last * 2**20 > free_memory():
            print(f"{count} ranks of {last:.0f} MiB and more do not fit here", flush=True)
            break
        found[count] = _measure(count)
        print(count, json.dumps(found[count]), flush=True)
    fits = {}
    for who in ("main", "others"):
        for key in (*PHASES, *KEPT):
            values = [found[count][who][key] for count in found]
            fits[f"{key} ({who})"] = _fit([*found], values)
    for name, fit in fits.items():
        print(
            f"{name:18} {fit['a']:10.4g} + {fit['b']:10.4g} P  worst {fit['worst']:4.0%}  "
            f"{FAR}: {fit['far']:.4g}"
        )
    if options.json:
        document = {
            "date": f"{datetime.date.today()}",
            "machine": platform.processor() or platform.machine(),
            "versions": current_versions(),
            "found": found,
            "fits": fits,
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="8,16,32,64")
    parser.add_argument("--json")
    return parser.parse_args()


def _measure(count: int) -> dict[str, dict[str, float]]:
    """Run so many ranks; what the main one took, and the medians of the others."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        fork = multiprocessing.get_context("fork")
        ranks = [
            fork.Process(target=_rank, args=(rank, count, port, Path(folder)))
            for rank in range(count)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        if any(one.exitcode for one in ranks):
            raise SystemExit(f"{count} ranks: {[one.exitcode for one in ranks]}")
        each = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count)]
    others = {key: statistics.median(one[key] for one in each[1:]) for key in each[0]}
    return {"main": each[0], "others": others}


def _rank(rank: int, count: int, port: int, folder: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    found: dict[str, float] = {}
    since = time.process_time()

    def phase(name: str) -> None:
        nonlocal since
        now = time.process_time()
        found[name] = now - since
        since = now

    start_ranks("cpu", timeout=600, facts={"recipe": {f"key{i}": "x" * 50 for i in range(60)}})
    phase("meet")
    replicas = count // 8
    grid = hs.Grid(data=replicas, depth=2, height=2, width=2)
    phase("grid")
    source = SyntheticVolumes((4, WIDTH, WIDTH, WIDTH), samples=2 * replicas)
    splits = [
        hs.open(source, grid, batch_size=replicas, split="all", store=StorePolicy("store"))
        for _ in range(2)
    ]
    phase("data")
    model = hs.parallelize(_network(), grid)
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        for x, y in splits[0].epoch(epoch):
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    phase("step")
    hs.save(folder / "checkpoint", model, optimizer)
    phase("save")
    hs.load(folder / "checkpoint", model, optimizer)
    phase("load")
    found["sockets"] = sum(_is_socket(name) for name in os.listdir("/proc/self/fd"))
    found["threads"] = len(os.listdir("/proc/self/task"))
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = [int(line.split()[1]) for line in rollup if line.startswith("Private_")]
    found["private"] = sum(private) / 1024
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    grid.barrier()
    for split in splits:
        split.close()
    stop_distributed()
    os._exit(0)


def _network() -> nn.Module:
    """Three convolutions and a batch norm: small, so that what belongs to ranks is seen."""
    return nn.Sequential(
        nn.Conv3d(4, 8, 3, padding=1),
        nn.BatchNorm3d(8),
        nn.ReLU(),
        nn.Conv3d(8, 8, 3, padding=1),
        nn.AvgPool3d(2),
        nn.Conv3d(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def _is_socket(name: str) -> bool:
    try:
        return "socket" in os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # what listed the folder
        return False


def _fit(ranks: list[int], values: list[float]) -> dict[str, float]:
    """Fit a line; what it says far away, and its worst deviation."""
    known = np.array(values)
    columns = np.stack([np.ones(len(ranks)), np.array(ranks, float)], axis=1)
    a, b = np.linalg.lstsq(columns / known[:, None], np.ones(len(ranks)), rcond=None)[0]
    worst = float(np.max(np.abs(columns @ [a, b] / known - 1)))
    return {"a": float(a), "b": float(b), "worst": worst, "far": float(a + b * FAR)}


if __name__ == "__main__":
    main()
