"""How long a step waits for a checkpoint that is written behind it, over what writing takes.

    python benchmarks/checkpoint.py [--mebibytes 64 128] [--ranks 1 2] [--turns 6] [--json OUT]

The state is that of Adam over weights of so many MiB: three times as much. Every turn begins a
checkpoint, computes for a while (``--compute`` [s], in place of a forward and backward pass), and
changes the state by a step. *wait* is how long it did neither, before and after the computing;
*writing* is until the checkpoint is in its place, and *whole* is one that is waited for, without
computing. Medians over the turns but the first, whose wait, *first*, is also for memory that nobody
had before; of several ranks, the slowest.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from clock import machine
from launch import run_ranks
from torch import nn

from hyperslab.checkpoint.background import BackgroundWriter
from hyperslab.checkpoint.retention import save_step

Seconds = dict[str, float]


def main() -> None:
    """Print one line a size and number of ranks."""
    options = _options()
    where = machine()
    rows = []
    for ranks in options.ranks:
        for size in options.mebibytes:
            folder = options.folder / f"{size}-{ranks}"
            found = run_ranks(ranks, measure, size, options.turns, options.compute, folder)
            shutil.rmtree(folder, ignore_errors=True)
            slowest = {key: max(of[key] for of in found) for key in found[0]}
            row = {"mebibytes": size, "ranks": ranks, **shares(slowest)}
            print("  ".join(f"{key} {value:.3g}" for key, value in row.items()), flush=True)
            rows.append(row)
    if options.json is not None:
        facts = {**where, "options": {"turns": options.turns, "compute": options.compute}}
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


def shares(seconds: Seconds) -> Seconds:
    """With the waits as shares of the writing."""
    return {
        **seconds,
        "wait / writing": seconds["wait"] / seconds["writing"],
        "first / writing": seconds["first"] / seconds["writing"],
    }


def measure(mebibytes: int, turns: int, seconds: float, folder: Path) -> Seconds:
    """One rank's times [s]."""
    folder.mkdir(parents=True, exist_ok=True)
    model, optimizer = state_of(mebibytes)
    writer = BackgroundWriter()
    waits: list[float] = []
    writings: list[float] = []
    wholes: list[float] = []
    save_step(folder, 1, model, optimizer, best=True, keep=1)  # imports and the like
    for turn in range(turns):

        def save(behind: BackgroundWriter | None, step: int = 2 * turn) -> None:
            save_step(folder, step, model, optimizer, best=True, keep=1, behind=behind)

        dist.barrier()
        began = time.perf_counter()
        waiting = _seconds(lambda save=save: save(writer))
        _compute(seconds)
        waiting += _seconds(writer.memory.copied.wait)  # as the step would
        waits.append(waiting)
        writer.wait()
        writings.append(time.perf_counter() - began)
        optimizer.step()
        dist.barrier()
        wholes.append(_seconds(lambda save=save, step=2 * turn + 1: save(None, step)))
    return {
        "first": waits[0],
        "wait": statistics.median(waits[1:]),
        "writing": statistics.median(writings[1:]),
        "whole": statistics.median(wholes[1:]),
        "memory": writer.memory.nbytes / 2**20,
    }


def state_of(mebibytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Weights in layers of 4 MiB, and Adam after a step."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(mebibytes // 4)))
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    return model, optimizer


def _compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    x = torch.rand(512, 512)
    while time.perf_counter() < end:
        x.mm(x)


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--compute", type=float, default=0.2)
    parser.add_argument("--folder", type=Path, default=Path("build/checkpoint"))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
