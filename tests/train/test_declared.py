"""A new optimizer, schedule, network or logger is one file and one line (tier: one process).

Each is written into a copy of the package, with one line of one other file, and trained with.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hyperslab
from tests.selection import in_gate

PACKAGE = Path(hyperslab.__file__).parent

SCHEDULE = """
from typing import Literal
from hyperslab.recipe.schedule import RateFunction

class Halving(RateFunction):
    name: Literal["halving"]
    every: int = 1

    def factor_at(self, epoch: float) -> float:
        return 0.5 ** (epoch // self.every)
"""

OPTIMIZER = """
from typing import Literal
import torch
from hyperslab.recipe.optimizer import OptimizerSection, Weights

class Signs(torch.optim.Optimizer):
    def __init__(self, weights, lr, keep):
        super().__init__(weights, {"lr": lr, "keep": keep})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                mean = state.setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["keep"])
                weight.sub_(mean.sign(), alpha=group["lr"])

class SignsSection(OptimizerSection):
    name: Literal["adamw"]  # torch has one of this name: ours is taken
    keep: float = 0.9

    def build(self, weights: Weights) -> torch.optim.Optimizer:
        return Signs(weights, self.learning_rate, self.keep)
"""

NETWORK = """
from typing import Literal
import torch
from hyperslab.recipe.network import ModelSection, Shape

class OneLayer(ModelSection):
    name: Literal["one_layer"]
    kernel: int = 3

    def build(self, shape: Shape, outputs: int, *, where: str):
        return torch.nn.Sequential(
            torch.nn.Conv3d(shape[0], outputs, self.kernel, padding=self.kernel // 2),
            torch.nn.AdaptiveAvgPool3d(1),
            torch.nn.Flatten(),
        )
"""

LOGGER = """
import json

class LinesLog:
    library = None

    def __init__(self, run, settings, step):
        self.file = (run / "lines.jsonl").open("a")

    def add(self, values, step):
        self.file.write(json.dumps([step, *values]) + "\\n")

    def flush(self):
        self.file.flush()

    def close(self):
        self.file.close()
"""

ADDITIONS = {
    "recipe/halving.py": (
        SCHEDULE,
        "recipe/optimizer.py",
        "from hyperslab.recipe.instantiate import",
        "from hyperslab.recipe import halving  # noqa: F401 - declares itself",
    ),
    "recipe/signs.py": (
        OPTIMIZER,
        "recipe/schema.py",
        "from hyperslab.recipe.section import",
        "from hyperslab.recipe import signs  # noqa: F401 - declares itself",
    ),
    "recipe/one_layer.py": (
        NETWORK,
        "recipe/schema.py",
        "from hyperslab.recipe.section import",
        "from hyperslab.recipe import one_layer  # noqa: F401 - declares itself",
    ),
    "train/lines.py": (
        LOGGER,
        "recipe/schema.py",
        '    "tensorboard": ',
        '    "lines": "hyperslab.train.lines.LinesLog",',
    ),
}
"""New files by path: their text, and the file that gets a line before the one that begins so."""

RECIPE = """
data: {synthetic: {width: 8, samples: 8}, batch_size: 2}
model: {name: one_layer, kernel: 1}
optimizer: {name: adamw, learning_rate: 0.5, keep: 0.5, schedule: {name: halving, every: 1}}
loggers: [lines]
epochs: 2
device: cpu
output: run
"""

PROGRAM = """
import csv, hyperslab
from hyperslab.errors import RecipeError
from hyperslab.recipe.load import load_recipe
from hyperslab.train.run import train

assert hyperslab.__file__.startswith({place!r}), hyperslab.__file__
train(load_recipe("own.yaml"))
train(load_recipe("own.yaml", ["epochs=3"]), resume=True)
with open("run/steps.csv", newline="") as file:
    print(*(row["learning_rate"] for row in csv.DictReader(file)))
for key in ("model", "optimizer", "optimizer.schedule"):
    try:
        load_recipe("own.yaml", [key + ".name=haelving"])
    except RecipeError as error:
        print(str(error).splitlines()[0])
"""


@pytest.mark.parametrize(
    "line", in_gate([True, False], kept=[True]), ids=["one line", "without the line"]
)
def test_one_file_and_one_line(tmp_path: Path, line: bool) -> None:
    copy = tmp_path / "hyperslab"
    shutil.copytree(PACKAGE, copy)  # with what Python has compiled
    for new, (text, other, before, added) in ADDITIONS.items():
        (copy / new).write_text(text)
        lines = (copy / other).read_text().splitlines()
        place = next(i for i, found in enumerate(lines) if found.startswith(before))
        if line:
            lines.insert(place, added)
        (copy / other).write_text("\n".join(lines) + "\n")
    (tmp_path / "own.yaml").write_text(RECIPE)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(place=str(tmp_path))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if not line:
        assert done.returncode == 1
        assert "bad value 'one_layer' for 'model.name'" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    rates, *refused = done.stdout.splitlines()[-4:]
    steps = len(rates.split()) // 3
    assert [float(rate) for rate in rates.split()] == [
        rate for rate in (0.5, 0.25, 0.125) for _ in range(steps)
    ]
    for words, names in zip(
        refused, ("one_layer unet3d", "adamw sgd", "halving linear"), strict=True
    ):
        assert {*names.split()} <= {*re.split(r"\W+", words)}
    logged = (tmp_path / "run" / "lines.jsonl").read_text().splitlines()
    assert len([row for row in logged if "step/loss" in row]) == 3 * steps
