"""The recipe of Mathuriya et al. 2018 on own universes: relative errors by their formula.

    python benchmarks/sc18.py WORK [key=value ...] [--size 128] [--count 100] [--epochs 20]
                              [--ranks 2] [--json OUT]

Makes COUNT universes of SIZE³ voxels in a box of 256 Mpc/h, drawn from the paper's ranges, in
WORK/universes-SIZE, trains recipes/sc18.yaml on 80 % of them in WORK/run-SIZE, and measures the
errors on the 10 % of the test split. Every part goes on where it was stopped. What cannot be the
paper's is overridden here, `overrides` says what; further ``key=value`` come last.

The figure to compare with is what always predicting the mean of the training split gives by the
same formula: the ranges are narrow, so small relative errors alone say nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from clock import machine

RECIPE = Path(__file__).parent.parent / "recipes" / "sc18.yaml"
BOX = 256  # [Mpc/h]: as wide as a sample of the paper's
BATCH = 2  # samples in a step: more steps in few epochs
RATE = 2e-4  # at the paper's 2e-3 so small mini-batches keep the training loss above the mean's


def overrides(folder: Path, size: int, count: int, epochs: int, ranks: int) -> list[str]:
    """What is not the paper's: size and number of universes, epochs, mini-batches, precision."""
    tenth = max(1, count // 10)
    return [
        f"data.path={folder}",
        "data.subvolume=null",
        f"model.width={size}",
        f"data.counts=[{count - 2 * tenth}, {tenth}, {tenth}]",
        f"data.batch_size={BATCH}",
        "optimizer.accumulate=1",
        f"optimizer.learning_rate={RATE}",
        f"optimizer.schedule.epochs={epochs}",
        f"epochs={epochs}",
        f"grid.data={ranks}",
        "precision=bf16",
        "device=auto",
    ]


def hyperslab(*words: object) -> None:
    """A command of its own, which may be stopped and run again."""
    subprocess.run([sys.executable, "-m", "hyperslab", *map(str, words)], check=True)


def table(path: Path) -> list[dict[str, float]]:
    """The rows of a history."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: float(value) for key, value in row.items() if value} for row in rows]


def verdict(errors: dict[str, dict[str, float]]) -> dict[str, list[str]]:
    """For which parameters the network is better than the mean, by the paper's formula."""
    better = [
        name
        for name, row in errors.items()
        if row["relative_error_sc18"] < row["relative_error_sc18_of_mean"]
    ]
    return {"better_than_the_mean": better, "not": [name for name in errors if name not in better]}


def result(run: Path, about: dict[str, Any]) -> dict[str, Any]:
    """What is recorded: all errors of the test split, the loss by epoch, the time of a step."""
    metrics = json.loads((run / "evaluation" / "metrics.json").read_text())
    errors = metrics["parameters"]
    steps = table(run / "steps.csv")
    return {
        "date": metrics["date"],
        "machine": machine(),
        **about,
        "checkpoint": metrics["checkpoint"],
        "samples": metrics["samples"],
        **verdict(errors),
        "parameters": errors,
        "step_seconds": statistics.median(row["step_seconds"] for row in steps),
        "epochs": [
            {key: row[key] for key in ("epoch", "train_loss", "validation_loss") if key in row}
            for row in table(run / "epochs.csv")
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("keys", nargs="*")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_intermixed_args()
    size = options.size
    count = options.count
    folder = options.work / f"universes-{size}"
    run = options.work / f"run-{size}"
    simulate = ["--count", count, "--size", size, "--box-size", BOX, "--ranges", "sc18"]
    hyperslab("simulate", folder, *simulate)
    keys = [*overrides(folder.absolute(), size, count, options.epochs, options.ranks)]
    keys += options.keys
    hyperslab("train", RECIPE, *keys, "--ranks", options.ranks, "--output", run, "--resume")
    hyperslab("evaluate", run)
    about = {"universes": count, "size": size, "box_size": BOX, "overrides": keys[1:]}
    found = result(run, about)
    print(json.dumps(verdict(found["parameters"])))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
