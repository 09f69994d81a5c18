"""Trainings of one's own network, loss, optimizer and schedule, killed in the middle of an epoch
and gone on with on another grid (tiers: the command line on 2 ranks; torchrun; one process)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from hyperslab.train.evaluate import evaluate
from tests.train.scans import WINDOW, write_scans
from tests.train.universes import losses

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[2]

MINE = '''
import os
import time

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    """Halves and doubles its input; dropout and batch norm have states of their own."""

    def __init__(self, channels: int, classes: int, width: int = 4):
        super().__init__()
        self.down = nn.Conv3d(channels, width, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm3d(width)
        self.up = nn.ConvTranspose3d(width, classes, 2, stride=2)

    def forward(self, x):
        return self.up(F.dropout(F.relu(self.norm(self.down(x))), 0.1, self.training))


class Loss(nn.Module):
    def __init__(self, weights: list[float]):
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))

    def forward(self, prediction, labels):
        time.sleep(float(os.environ.get("PAUSE", 0)))
        return F.cross_entropy(prediction, labels, self.weights)


class Signs(torch.optim.Optimizer):
    """Steps by the sign of a running mean, ever shorter ones."""

    def __init__(self, params, lr: float, beta: float = 0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["mean"] = torch.zeros_like(weight)
                    state["count"] = 0
                state["count"] += 1
                state["mean"].lerp_(weight.grad, 1 - group["beta"])
                bounded = (state["mean"] * 50).tanh()
                weight.sub_(bounded, alpha=group["lr"] / state["count"] ** 0.5)


class Waves(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, period: int):
        self.period = period
        super().__init__(optimizer)

    def get_lr(self):
        return [lr / (1 + self.last_epoch % self.period) for lr in self.base_lrs]
'''

SCRIPT = """
import sys

import torch
import hyperslab as hs
import mine

torch.manual_seed(1)
net = mine.Net(1, 3)
optimizer = mine.Signs(net.parameters(), lr=0.02)
run = hs.fit(
    net,
    {"path": "scans", "batch_size": 2, "multiple": 2, "window": [-100, 200]},
    output=sys.argv[1],
    loss=mine.Loss([1.0, 2.0, 3.0]),
    optimizer=optimizer,
    schedule=mine.Waves(optimizer, 2),
    metrics={"worst": mine.Loss([0.0, 0.0, 1.0])},
    checkpoint={"every_steps": 2},
    epochs=3,
    device="cpu",
    timeout=60,
    resume="resume" in sys.argv,
)
run.evaluate()
run.report()
"""

STEPS = 6
"""Of an epoch: 11 scans to train on, at most two a step."""

RUNNING = [sys.executable, "-m", "hyperslab", "train", "mine.yaml"]
SCRIPTED = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"]


def write_recipe(path: Path) -> None:
    values = {
        "model": {
            "target": "mine.Net",
            "channels": "${data.channels}",
            "classes": "${data.outputs}",
        },
        "data": {"path": "scans", "batch_size": 2, "multiple": 2, "window": list(WINDOW)},
        "loss": {"target": "mine.Loss", "weights": [1, 2, 3]},
        "optimizer": {
            "target": "mine.Signs",
            "lr": 0.02,
            "schedule": {"target": "mine.Waves", "period": 3, "every": "step"},
        },
        "metrics": {"worst": {"target": "mine.Loss", "weights": [0, 0, 1]}},
        "checkpoint": {"every_steps": 2},
        "epochs": 3,
        "device": "cpu",
        "timeout": 60,
    }
    path.write_text(yaml.safe_dump(values))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    write_scans(folder / "scans", 13)
    (folder / "mine.py").write_text(MINE)
    (folder / "script.py").write_text(SCRIPT)
    write_recipe(folder / "mine.yaml")
    return folder


def environment(pause: float) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PAUSE": str(pause)}
    return {**os.environ, **more}


def ended(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(0),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout


def killed(command: list[str], folder: Path, run: str) -> int:
    """Kill all processes of a training, at once, in its second epoch; the steps it had taken."""
    with (folder / f"{run}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(0.3),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            begun = time.monotonic()
            while _steps(folder / run) <= STEPS:
                said = (folder / f"{run}.log").read_text()
                assert process.poll() is None, said
                assert time.monotonic() < begun + 120, said
                time.sleep(0.02)
        finally:
            for pid in [process.pid, *_below(process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    time.sleep(1)  # the folder's lock goes with the last of them
    return _steps(folder / run)


def _below(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    table = subprocess.check_output(["ps", "-eo", "pid=,ppid="], text=True)
    pairs = [tuple(map(int, line.split())) for line in table.splitlines()]
    found = [pid]
    for parent in found:
        found += [child for child, of in pairs if of == parent]
    return found[1:]


def _steps(run: Path) -> int:
    return len(losses(run)) if (run / "steps.csv").exists() else 0


@pytest.mark.long
def test_a_recipe_is_gone_on_with_after_a_kill(folder: Path) -> None:
    ended([*RUNNING, "--output", "whole"], folder)
    command = [*RUNNING, "--ranks", "2", "grid.depth=2", "--output", "parts"]
    assert STEPS < killed(command, folder, "parts") < 2 * STEPS
    other = [*RUNNING, "--ranks", "2", "grid.height=2", "--output", "parts", "--resume"]
    ended(other, folder)
    assert losses(folder / "parts") == pytest.approx(losses(folder / "whole"), rel=1e-4)
    assert len(losses(folder / "whole")) == 3 * STEPS


@pytest.mark.long
def test_a_program_is_gone_on_with_after_a_kill(folder: Path) -> None:
    ended([sys.executable, "script.py", "alone"], folder)
    assert STEPS < killed([*SCRIPTED, "program"], folder, "program") < 2 * STEPS
    ended([sys.executable, "script.py", "program", "resume"], folder)
    assert losses(folder / "program") == pytest.approx(losses(folder / "alone"), rel=1e-4)
    assert (folder / "program" / "report.html").exists()
    with pytest.raises(Exception, match="pass it"):
        evaluate(folder / "program")
