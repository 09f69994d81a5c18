"""What fraction of a step is not convolution, on paper: CosmoFlow 512³ on many ranks.

    python benchmarks/not_convolution.py [--ranks 8 64 512] [--machine lassen-v100 laptop-2core]
                                   [--width 512] [--json OUT]

One sample is cut into cubes. The step of the busiest rank is traced, with and without batch norm,
and costed with a machine file: what convolutions take (of blocks and of their halos), all other
operators, the optimizer, what communication holds the rank up, and Python. Nothing is measured, and
no GPU is needed. With another version of hyperslab on ``PYTHONPATH`` it says what that one would
take; the commit stands beside the numbers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from lassen import workload
from published import Run

import hyperslab as hs
from hyperslab.planner.cost import step_cost
from hyperslab.planner.machine import Machine, load_machine
from hyperslab.planner.records import Trace
from hyperslab.planner.trace import busiest, trace_step

COLUMNS = (
    "convolution", "forward", "backward", "optimizer", "halos", "statistics", "gradients",
    "overhead",
)  # fmt: skip
"""Forward and backward are those of the operators that are no convolution."""


def cubes(ranks: int) -> dict[str, int]:
    """The axes of a grid with as many ranks along each, or nearly.

    >>> cubes(64), cubes(2)
    ({'depth': 4, 'height': 4, 'width': 4}, {'depth': 2, 'height': 1, 'width': 1})
    """
    extents = [1, 1, 1]
    while ranks > 1:
        extents[extents.index(min(extents))] *= 2
        ranks //= 2
    return dict(zip(("depth", "height", "width"), extents, strict=True))


def fractions(trace: Trace, machine: Machine, ranks: int) -> dict[str, float]:
    """Seconds by cause; they add up to ``step``. ``guessed``: of shapes nobody measured."""
    cost = step_cost(trace, machine, ranks)
    setting = machine.setting(ranks)
    found: dict[str, float] = defaultdict(float)
    for operator in trace.operators:
        is_convolution = "convolution" in operator.call.name
        found["convolution" if is_convolution else operator.stage] += setting.estimate(
            operator
        ).seconds
    for cause in ("halos", "statistics", "gradients", "overhead"):
        found[cause] = getattr(cost.seconds, cause)
    found["step"] = cost.seconds.total
    found["not convolution"] = 1 - found["convolution"] / found["step"]
    found["guessed"] = cost.guessed
    return dict(found)


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every machine, number of ranks, and network."""
    table = []
    for name in options.machine:
        machine = load_machine(name)
        kind = "cuda" if machine.device == "cuda" else "cpu"
        for batch_norm in (False, True):
            for ranks in options.ranks:
                extents = cubes(ranks)
                run = Run("cosmoflow", options.width, 1, ranks, ranks, batch_norm)
                trace = trace_step(workload(run), extents, busiest(extents), kind)
                about = {"machine": name, "batch_norm": batch_norm, "ranks": ranks}
                table.append({**about, "grid": extents, **fractions(trace, machine, ranks)})
    return table


def print_rows(table: list[dict[str, Any]]) -> None:
    print(f"{'[ms]':36}{'step':>10}" + "".join(f"{c:>12}" for c in COLUMNS) + f"{'not conv':>10}")
    for row in table:
        norm = "batch norm" if row["batch_norm"] else "no norm"
        cells = "".join(f"{1e3 * row.get(c, 0.0):12.3f}" for c in COLUMNS)
        print(
            f"{row['machine']:14}{norm:12}{row['ranks']:4} ranks{1e3 * row['step']:10.2f}{cells}"
            f"{100 * row['not convolution']:9.1f}%"
        )


def commit() -> str:
    """Of the hyperslab that is imported."""
    folder = Path(hs.__file__).parent
    return subprocess.run(
        ["git", "-C", str(folder), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--machine", nargs="+", default=["lassen-v100", "laptop-2core"])
    parser.add_argument("--width", type=int, default=512, help="voxels along each side")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    options = parser.parse_args()
    table = rows(options)
    print_rows(table)
    if options.json:
        about = {"date": date.today().isoformat(), "torch": torch.__version__, "commit": commit()}
        options.json.write_text(json.dumps({**about, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
