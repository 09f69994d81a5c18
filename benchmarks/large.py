"""Volumes that do not fit: what a rank takes of memory, and how long a step is, beside the plan.

    python benchmarks/large.py [ROW ...] [--width W] [--steps 6] [--memory tile] [--plan]
                               [--machine FILE] [--json OUT]

Each row is `hyperslab train` on synthetic volumes, in fresh processes of one thread: the most
resident memory of a rank's process (data and optimizer included), the step (the shortest; the
first makes the optimizer's state), and the system's share of the main rank's processor time, from
the end of the second step to that of the last: by then all memory has been taken once. Fewer than
five steps never have as many mini-batches read ahead as the plan counts. Beside it: what the plan
said, and what plain torch on one rank keeps for the backward pass, counted by hooks on tensors
without memory. ``--plan`` runs nothing. A row that OUT has already, at that width and in
that mode, is not measured again, so a table can be made row by row.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from clock import machine

from hyperslab.models import CosmoFlow, UNet3D
from hyperslab.parallel.parallelize import Memory
from hyperslab.planner.auto import machine_for
from hyperslab.planner.job import job_of
from hyperslab.planner.search import PlanBounds, process_bytes, trace_one
from hyperslab.recipe.schema import Recipe

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """Names a network on its whole volume, and the most memory [GiB] that a rank is to take."""

    bar: float
    width: int
    precision: str = "float32"
    ranks: int = 2
    memory: str = "tile"
    batch_norm: bool = False
    network: str = "cosmoflow"

    def recipe(self, steps: int, output: Path) -> dict[str, Any]:
        """Make the recipe that is trained for so many steps."""
        size = {"width": self.width, "batch_norm": self.batch_norm}
        model: dict[str, Any] = {"name": "cosmoflow", "variant": "paper2020", **size}
        synthetic: dict[str, Any] = {"width": self.width, "samples": steps + 1}
        if self.network == "unet3d":
            model = {"name": "unet3d", "channels": 32, "levels": 3}
            synthetic |= {"channels": 1, "classes": 3}
        return {
            "model": model,
            "data": {
                "synthetic": synthetic,
                "mode": "direct",
                "batch_size": 1,
                "counts": [steps, 1, 0],
            },
            "grid": {"depth": self.ranks},
            "precision": self.precision,
            "memory": self.memory,
            "optimizer": {"name": "adam", "learning_rate": 1e-4},
            "loss": "mse" if self.network == "cosmoflow" else "cross_entropy",
            "epochs": 1,
            "loggers": [{"target": "large.ProcessorTime"}],
            "output": str(output),
        }


class ProcessorTime:
    """Logs what the main rank's process has spent at the end of each step."""

    library = None

    def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None:
        self.path = Path(run, SPENT)

    def add(self, values: Mapping[str, float], step: int) -> None:
        if not any(name.startswith("step/") for name in values):
            return  # an epoch's, which come behind its validation
        now = resource.getrusage(resource.RUSAGE_SELF)
        spent = {"user": now.ru_utime, "system": now.ru_stime, "faults": now.ru_minflt}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **spent}) + "\n")

    def flush(self) -> None:
        """Do nothing: each line is on disk."""

    def close(self) -> None:
        """Do nothing, as `flush`."""


SPENT = "spent.jsonl"


ROWS = {
    "cosmoflow-512-bf16": Row(4.5, 512, "bf16"),
    "cosmoflow-512": Row(7, 512),
    "cosmoflow-512-batch-norm": Row(9, 512, batch_norm=True),
    "cosmoflow-512-one-rank": Row(12, 512, ranks=1),
    "unet3d-256-bf16": Row(9, 256, "bf16", memory="offload", network="unet3d"),
    "unet3d-256": Row(11, 256, memory="offload", network="unet3d"),
    "cosmoflow-256": Row(0, 256),
    "cosmoflow-256-none": Row(0, 256, memory="none"),
    "cosmoflow-256-recompute": Row(0, 256, memory="recompute"),
}


def kept_by_plain_torch(row: Row) -> int:
    """Count the bytes that a forward pass of plain torch keeps, in float32, on one rank."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage  # which stays alive, so that no other has its place
        return tensor

    with torch.device("meta"):
        model: torch.nn.Module = UNet3D(channels=32, levels=3)
        x = torch.empty(1, 1, row.width, row.width, row.width)
        if row.network == "cosmoflow":
            model = CosmoFlow(row.width, batch_norm=row.batch_norm)
            x = x.expand(1, 4, -1, -1, -1).contiguous()
    own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
        if row.network == "cosmoflow":
            F.mse_loss(y, torch.empty_like(y))
        else:
            F.cross_entropy(y, torch.empty(1, *y.shape[2:], dtype=torch.int64, device="meta"))
    return sum(s.nbytes() for at, s in storages.items() if at not in own)


def planned(recipe: dict[str, Any], name: str | None) -> dict[str, float]:
    """Ask the plan what the recipe takes of a rank [B] and how long its step is [s]."""
    parsed = Recipe.model_validate(recipe)
    bounds = PlanBounds(24 * GIB, "", process_bytes())
    found = trace_one(job_of(parsed), parsed.grid, machine_for(name, parsed), bounds)
    parts = {part: getattr(found.memory, part) for part in ("activations", "workspace")}
    return {"peak": found.memory.total, "step": found.seconds.total, **parts}


def measured(recipe: dict[str, Any], ranks: int) -> dict[str, float]:
    """Train, and read the main rank's peak [B], its shortest step [s], and the system's share."""
    path = Path(recipe["output"], "..", "recipe.yaml").resolve()
    path.write_text(json.dumps(recipe))  # which is YAML, too
    command = [sys.executable, "-m", "hyperslab", "train", str(path), "--ranks", str(ranks)]
    modules = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": modules}
    subprocess.run(command, check=True, env=env)
    lines = Path(recipe["output"], SPENT).read_text().splitlines()
    spent = {line["step"]: line for line in map(json.loads, lines)}
    first, last = spent[min(2, len(spent))], spent[len(spent)]
    system, user, faults = (last[key] - first[key] for key in ("system", "user", "faults"))
    with Path(recipe["output"], "steps.csv").open() as file:
        steps = list(csv.DictReader(file))
    return {
        "peak": max(int(step["memory_bytes"]) for step in steps),
        "step": min(float(step["step_seconds"]) for step in steps),
        "steps": len(steps),
        "system": system / (system + user) if user else math.nan,
        "faults": faults,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("row", nargs="*", choices=[*ROWS, []], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--width", type=int, help="voxels along each side, in place of the row's")
    parser.add_argument("--memory", choices=get_args(Memory), help="the same")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plan", action="store_true", help="run nothing")
    parser.add_argument("--machine", help="for the plan: shipped, or a calibrated file")
    parser.add_argument("--json", type=Path, metavar="OUT", help="the rows so far")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text())
    changes = {key: getattr(options, key) for key in ("width", "memory")}
    changes = {key: value for key, value in changes.items() if value is not None}
    print(
        f"{'row':38}{'bar':>6}{'peak':>8}{'plan':>8}{'step':>8}{'plan':>8}{'system':>8}{'plain':>8}"
    )
    for name in options.row or ROWS:
        row = Row(**{**vars(ROWS[name]), **changes})
        key = f"{name} {row.width} {row.memory}"
        found = rows.setdefault(key, {"bar": row.bar, **machine()})
        with tempfile.TemporaryDirectory() as folder:
            recipe = row.recipe(options.steps, Path(folder, "run"))
            if "planned" not in found:
                found["planned"] = planned(recipe, options.machine)
                found["plain"] = kept_by_plain_torch(row)
            if "measured" not in found and not options.plan:
                found["measured"] = measured(recipe, row.ranks)
        print_row(key, found)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")


def print_row(name: str, row: dict[str, Any]) -> None:
    """Print memory in GiB, steps in seconds, a dash where nothing was measured."""
    run = row.get("measured")
    peak, step, system = ("-",) * 3
    if run is not None:
        peak, step = f"{run['peak'] / GIB:.2f}", f"{run['step']:.2f}"
        system = f"{100 * run['system']:.0f}%"
    plan = row["planned"]
    print(
        f"{name:38}{row['bar']:6}{peak:>8}{plan['peak'] / GIB:8.2f}{step:>8}{plan['step']:8.2f}"
        f"{system:>8}{row['plain'] / GIB:8.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
