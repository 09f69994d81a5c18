"""`hyperslab.fit`: the run folder of a program's own network (tiers: one process; a few gloo ranks;
torchrun)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import hyperslab as hs
from hyperslab.checkpoint.retention import latest
from hyperslab.errors import RecipeError
from hyperslab.recipe.load import load_recipe
from hyperslab.train.evaluate import evaluate
from hyperslab.train.network import digest_of_network
from hyperslab.train.run import train
from hyperslab.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.recipe.own_classes import Blobs, Net
from tests.train.universes import losses

ROOT = Path(__file__).parents[2]


def trained(folder: Path, *, width: int = 4, **keys: Any) -> hs.TrainedRun:
    """A network, an optimizer, a schedule and a source of a program's."""
    torch.manual_seed(3)
    net = Net(1, 1, width=width)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    options: dict[str, Any] = {
        "batch_size": 4,
        "epochs": 3,
        "loss": torch.nn.SmoothL1Loss(),
        "metrics": {"worst": lambda p, y: (p - y).abs().amax()},
        "optimizer": optimizer,
        "schedule": schedule,
        "device": "cpu",
        "timeout": 60,
    }
    return hs.fit(net, Blobs(20), output=folder, **{**options, **keys})


def in_ranks(folder: Path, grid: dict[str, int] | None) -> None:
    trained(folder, grid=grid)


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fit") / "run"
    run = trained(folder)
    run.evaluate()
    run.report()
    return folder


def test_the_folder_is_that_of_a_run(serial: Path) -> None:
    assert len(losses(serial)) == 12
    names = {path.name for path in serial.iterdir()}
    assert names >= {"recipe.yaml", "steps.csv", "epochs.csv", "checkpoints", "evaluation"}
    header, *rows = (serial / "epochs.csv").read_text().splitlines()
    assert "validation_worst" in header
    rates = [float(row.split(",")[header.split(",").index("learning_rate")]) for row in rows]
    assert rates == [5e-3, 2.5e-3, 1.25e-3]
    assert "Net" in (serial / "report.html").read_text()
    values = yaml.safe_load((serial / "recipe.yaml").read_text())
    assert values["handed_in"]["optimizer"].endswith("AdamW")


@pytest.mark.parametrize("grid", [{"depth": 2}, {"data": 2}, None], ids=str)
def test_on_two_ranks_the_losses_are_the_same(tmp_path: Path, serial: Path, grid: Any) -> None:
    run_ranks(2, in_ranks, tmp_path / "run", grid)
    assert losses(tmp_path / "run") == pytest.approx(losses(serial), rel=1e-4)
    said = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["grid"]
    assert said["depth" if grid is None else next(iter(grid))] == 2


def test_stopped_by_a_signal_and_gone_on_with(
    tmp_path: Path, serial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer.train_step

    def interrupted(self: Trainer, *args: Any) -> Any:
        if self.at.step == 5:
            signal.raise_signal(signal.SIGUSR1)
        return original(self, *args)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    with pytest.raises(SystemExit) as ended:
        trained(tmp_path / "run")
    assert ended.value.code == 128 + signal.SIGUSR1
    assert latest(tmp_path / "run") is not None
    monkeypatch.undo()
    with pytest.raises(RecipeError, match=r"model\.digest is"):
        trained(tmp_path / "run", resume=True, width=5)
    trained(tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(serial)


def test_the_command_line_says_what_to_hand_in(serial: Path) -> None:
    with pytest.raises(RecipeError, match=r"Blobs\n    pass it: hs\.TrainedRun\(run, data="):
        evaluate(serial)
    with pytest.raises(
        RecipeError, match=r"(?s)passed the network .*Net, loss .*continue it there"
    ):
        train(load_recipe(serial / "recipe.yaml"), resume=True)
    with pytest.raises(RecipeError, match=r"(?s)Net needs the argument 'channels'.*model=Net\("):
        hs.TrainedRun(serial, data=Blobs(20)).evaluate()
    with pytest.raises(hs.HyperslabError, match=r"does not fit this model: body"):
        hs.TrainedRun(serial, model=Net(1, 1, width=6), data=Blobs(20)).evaluate()
    found = hs.TrainedRun(serial, model=Net(1, 1), data=Blobs(20)).evaluate()
    assert set(found.errors) == {"y0"}  # type: ignore[union-attr]


def test_evaluating_leaves_the_network_as_it_was(tmp_path: Path) -> None:
    net = Net(1, 1)
    run = hs.fit(net, Blobs(20), output=tmp_path / "run", batch_size=4, epochs=2, device="cpu")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    run.evaluate(checkpoint="step-00000004")
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_sections_with_classes_make_a_run_of_the_command_line(tmp_path: Path) -> None:
    hs.fit(
        {"target": Net, "channels": 1, "outputs": "${data.outputs}"},
        {"target": Blobs, "count": 10, "transform": None},
        output=tmp_path / "run",
        batch_size=4,
        epochs=1,
        optimizer={"name": "adamw", "lr": 1e-2},
        device="cpu",
    )
    assert set(evaluate(tmp_path / "run").errors) == {"y0"}  # type: ignore[union-attr]
    train(load_recipe(tmp_path / "run" / "recipe.yaml", ["epochs=2"]), resume=True)
    assert len(losses(tmp_path / "run")) == 4


class Plain(torch.nn.Module):
    """Without arguments that have to be given."""

    def __init__(self, slope: float = 0.1) -> None:
        super().__init__()
        self.slope = slope
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.nn.functional.leaky_relu(x, self.slope).mean((2, 3, 4)))


def test_a_network_without_arguments_is_made_anew_and_no_other_for_it(tmp_path: Path) -> None:
    for slope, name in ((0.1, "same"), (0.3, "other")):
        hs.fit(
            Plain(slope),
            {"target": Blobs, "count": 10},
            output=tmp_path / name,
            batch_size=4,
            epochs=1,
            device="cpu",
        )
    assert set(evaluate(tmp_path / "same").errors) == {"y0"}  # type: ignore[union-attr]
    with pytest.raises(RecipeError, match=r"Plain\(\) is built differently from the network"):
        evaluate(tmp_path / "other")


def test_the_digest_tells_settings_apart_that_change_no_shape() -> None:
    digests = {
        digest_of_network(net)
        for net in (
            Plain(),
            Plain(0.2),
            torch.nn.Conv3d(1, 1, 3, padding=1),
            torch.nn.Conv3d(1, 1, 3, padding=0),
            torch.nn.Dropout(0.1),
            torch.nn.Dropout(0.2),
        )
    }
    assert len(digests) == 6
    assert digest_of_network(Plain()) in digests


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no batch size": ({"batch_size": None}, "'data.batch_size' is missing"),
    "an unknown key": ({"epoch": 3}, "unknown key 'epoch'\n    nearest: 'epochs'"),
    "a foreign schedule": ({"optimizer": "adam"}, "the schedule belongs to another optimizer"),
    "a loss that is none": ({"loss": 3}, "loss is a int: give a name or a function"),
    "a class for a loss": ({"loss": torch.nn.MSELoss}, "loss is the class MSELoss: .* an instance"),
    "a loss without a gradient": (
        {"loss": lambda p, y: (p - y).detach().square().mean()},
        "the loss fails .*: what it gives has no gradient",
    ),
    "a metric of a name that is taken": (
        {"metrics": {"loss": "l1"}},
        "metrics.loss: validation_loss is measured in any case\n    take another name",
    ),
    "a metric of the objective's": ({"metrics": {"mae": "mse"}}, "metrics.mae: .*in any case"),
    "a metric that breaks a line": ({"metrics": {"a,\nb": "mse"}}, "cannot head a column"),
    "a loss of another form": ({"loss": torch.nn.CTCLoss()}, "the loss fails on a prediction"),
}


@pytest.mark.parametrize(("keys", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        trained(tmp_path / "run", **keys)


def train_alone(folder: Path, **keys: Any) -> None:
    """A program that hands in its own optimizer."""
    hs.fit(
        keys.pop("model", None) or Net(1, 1),
        keys.pop("data", None) or Blobs(20),
        output=folder / "run",
        **{"batch_size": 4, "epochs": 2, "device": "cpu", **keys},
    )


def test_an_optimizer_that_cannot_train_the_network(tmp_path: Path) -> None:
    net = Net(1, 1)
    other = torch.optim.SGD([*net.parameters(), *Net(1, 1).parameters()], lr=0.1)
    with pytest.raises(RecipeError, match=r"4 of the 8 parameters that the optimizer .*Net"):
        train_alone(tmp_path, model=net, optimizer=other)
    net = Net(1, 1)
    closing = torch.optim.LBFGS(net.parameters())
    with pytest.raises(RecipeError, match=r"the optimizer \(LBFGS\) calls the network several"):
        train_alone(tmp_path, model=net, optimizer=closing)
    with pytest.raises(RecipeError, match="Flatten has no parameters that can be trained"):
        train_alone(tmp_path, model=torch.nn.Flatten())


def test_a_layer_at_rest_and_a_loss_of_one_dim(tmp_path: Path) -> None:
    net = Net(1, 1)
    groups = [{"params": net.body.parameters(), "lr": 0.0}, {"params": net.head.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    first = [p.clone() for p in net.parameters()]
    train_alone(
        tmp_path,
        model=net,
        optimizer=optimizer,
        loss=lambda p, y: (p - y).square().mean().reshape(1),
    )
    same = [torch.equal(a, b) for a, b in zip(first, net.parameters(), strict=True)]
    assert same == [True, True, False, False]


def test_what_is_no_network_and_no_data(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model is a int: pass a torch\.nn\.Module"):
        train_alone(tmp_path, model=5)
    with pytest.raises(RecipeError, match=r"data is a DataLoader: .*docs/own-data\.md"):
        train_alone(tmp_path, data=torch.utils.data.DataLoader([1]))


@pytest.mark.parametrize("steps", [8, 4])
def test_one_cycle_moves_on_after_each_step(tmp_path: Path, steps: int) -> None:
    net = Net(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    if steps < 8:
        with pytest.raises(RecipeError, match="ends after 4, but the training has 8"):
            train_alone(tmp_path, model=net, optimizer=optimizer, schedule=schedule)
        return
    train_alone(tmp_path, model=net, optimizer=optimizer, schedule=schedule)
    assert schedule.last_epoch == 8


SCRIPT = """
import torch
import hyperslab as hs
from tests.recipe.own_classes import Blobs, Net

torch.manual_seed(3)
run = hs.fit(Net(1, 1), Blobs(20), output="run", batch_size=4, epochs=2, device="cpu")
print(sorted(run.evaluate().errors))
"""


@pytest.mark.long
def test_a_plain_script_runs_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "script.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("['y0']") == 2
    assert done.stdout.count("epoch 2  train loss") == 1
    assert len(losses(tmp_path / "run")) == 8
