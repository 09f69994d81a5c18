"""What layers say in a step, and their gradients (tiers: one process; a few gloo ranks)."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hyperslab as hs
from hyperslab.errors import RecipeError
from hyperslab.recipe.load import load_recipe
from hyperslab.train.history import LAYER_COLUMNS, LAYERS, HistoryFile
from hyperslab.train.layers import common_share, layer_rows, random_states, repeating
from hyperslab.train.profile import read_profiles
from hyperslab.train.profiler import ProfilePolicy
from hyperslab.train.run import train
from hyperslab.train.trainer import Trainer
from tests.ops.slabs.test_stages import slabs_of
from tests.ranks import run_ranks
from tests.selection import in_gate
from tests.train.universes import losses, run, write_recipe

NUMBERS = LAYER_COLUMNS[3:]
CONVOLUTIONS = ["features.conv1", "features.conv2"]
NAMES = [*CONVOLUTIONS, "head.fc1", "head.fc2", "head.fc3"]


def history(out: Path) -> list[dict[str, str]]:
    with (out / LAYERS).open(newline="") as file:
        return list(csv.DictReader(file))


def numbers(out: Path) -> np.ndarray:
    """Of all rows; where there is none it is NaN."""
    return np.array([[float(row[key] or "nan") for key in NUMBERS] for row in history(out)])


def test_noise_has_nothing_in_common_and_a_constant_everything() -> None:
    torch.manual_seed(0)
    noise = torch.randn(500, 30, dtype=torch.float64)
    assert common_share(noise) < 0.01
    assert common_share(torch.ones(7, 3)) == 1
    assert common_share(torch.zeros(7, 3)) == 1
    assert common_share(noise + 3).item() == pytest.approx(0.9, abs=0.01)
    assert common_share(noise[:5] + 3).item() == pytest.approx(0.9, abs=0.03)  # few samples
    assert common_share(noise[:1]).isnan(), "one sample has nothing to be compared with"


class Twice(nn.Module):
    """Uses one layer twice; one not at all; tokens of dense features; a tuple; two in one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm3d(2)
        self.again = nn.utils.parametrizations.weight_norm(nn.Conv3d(2, 2, 1))
        self.unused = nn.Linear(2, 2)
        self.tokens = nn.Linear(2, 3)
        self.memory = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.again(self.again(self.norm(self.stem(x))))
        y = self.tokens(y.flatten(2).transpose(1, 2))
        return self.memory(y)[0].mean(1)


def test_rows_by_hand() -> None:
    torch.manual_seed(0)
    model = Twice()
    x = torch.randn(3, 1, 4, 4, 4)
    states = random_states(x.device)
    (64 * model(x).sum()).backward()
    running = model.norm.running_mean.clone()
    with repeating(model, x.device, states):
        rows = layer_rows(model, lambda: model(x), scale=64)
    assert torch.equal(model.norm.running_mean, running)
    found = [(row["layer"], row["use"]) for row in rows]
    once = [("stem", 1), ("again", 1), ("again", 2), ("tokens", 1), ("unused", 1), ("memory", 1)]
    assert sorted(found) == sorted(once)
    assert [name for name, _ in found[:4]] == ["stem", "again", "again", "tokens"]
    of = {(row["layer"], row["use"]): row for row in rows}
    y = model.stem(x).detach()
    assert of["stem", 1]["mean"] == pytest.approx(y.mean().item(), rel=1e-4)
    assert of["stem", 1]["std"] == pytest.approx(y.std(correction=0).item(), rel=1e-5)
    share = common_share(y.mean((2, 3, 4)).double()).item()
    assert of["stem", 1]["common"] == pytest.approx(share, rel=1e-4)
    parts = [model.stem.weight, model.stem.bias]
    weight = torch.cat([p.flatten() for p in parts]).norm().item()
    gradient = torch.cat([p.grad.flatten() for p in parts]).norm().item() / 64
    assert of["stem", 1]["weight"] == pytest.approx(weight, rel=1e-5)
    assert of["stem", 1]["gradient"] == pytest.approx(gradient, rel=1e-5)
    assert of["stem", 1]["ratio"] == pytest.approx(gradient / weight, rel=1e-5)
    assert of["again", 1]["gradient"] == of["again", 2]["gradient"] > 0
    assert of["again", 1]["mean"] != of["again", 2]["mean"]
    z = model.tokens(model.again(model.again(model.norm(y))).flatten(2).transpose(1, 2)).detach()
    share = common_share(z.mean(1).double()).item()
    assert of["tokens", 1]["common"] == pytest.approx(share, rel=1e-4)
    assert of["unused", 1]["mean"] is of["unused", 1]["gradient"] is None
    assert of["unused", 1]["weight"] > 0
    assert of["memory", 1]["common"] is None, "it returns no tensor"
    assert of["memory", 1]["gradient"] > 0


class Drawing(nn.Module):
    """Draws from every global generator, and replaces a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(2, 2)
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(2) + random.random() + np.random.rand()  # noqa: NPY002
        self.last = noise
        return self.dense(x * noise)


def test_a_repetition_draws_the_same_and_leaves_no_trace() -> None:
    model, x = Drawing(), torch.ones(3, 2)
    states = random_states(x.device)
    y, buffer = model(x), model.last
    value = buffer.clone()
    torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002 - as a loss may do
    after = random_states(x.device)
    with repeating(model, x.device, states):
        assert torch.equal(model(x), y)
        assert model.last is not buffer
    assert model.last is buffer
    assert torch.equal(buffer, value)
    expected = torch.rand(2), random.random(), np.random.rand()  # noqa: NPY002
    for put, state in after:
        put(state)
    found = torch.rand(2), random.random(), np.random.rand()  # noqa: NPY002
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory, universes: Path) -> Path:
    """A run on one rank; steps 1, 3 and 5 of 6 are recorded."""
    recipe = write_recipe(tmp_path_factory.mktemp("serial") / "run.yaml", universes, epochs=2)
    run(recipe, "layers=2")
    return recipe


def test_a_run_records_every_so_many_steps_and_is_not_changed(
    tmp_path: Path, universes: Path, serial: Path
) -> None:
    out = serial.with_suffix("")
    rows = history(out)
    assert tuple(rows[0]) == LAYER_COLUMNS
    assert [(int(row["step"]), row["layer"]) for row in rows] == [
        (step, name) for step in (1, 3, 5) for name in NAMES
    ]
    recipe = write_recipe(tmp_path / "plain.yaml", universes, epochs=2)
    run(recipe)
    plain = recipe.with_suffix("")
    assert not (plain / LAYERS).exists()
    assert losses(out) == losses(plain)
    speeds = [steps(one)[1]["flops_per_second"] for one in (out, plain)]
    times = [float(steps(one)[1]["step_seconds"]) for one in (out, plain)]
    assert float(speeds[0]) * times[0] == pytest.approx(float(speeds[1]) * times[1], rel=1e-6)


def steps(out: Path) -> list[dict[str, str]]:
    with (out / "steps.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def run_over_slabs(recipe: Path, *overrides: str) -> None:
    """Let wide convolutions run over slabs, small as they are here."""
    with slabs_of(1):
        run(recipe, *overrides)


@pytest.mark.parametrize("ranks", in_gate([1, 2], kept=[2]))
def test_a_network_that_counts_its_mini_batches_is_not_changed(
    tmp_path: Path, universes: Path, ranks: int
) -> None:
    """Its validation normalises by statistics that it averages over the first mini-batches."""
    model = {"name": "multiscale", "channels": [3, 5], "summary_statistics": True, "dropout": 0.3}
    recipe = write_recipe(tmp_path / "run.yaml", universes, epochs=2, model=model)
    for name, layers in (("plain", "layers=null"), ("recorded", "layers=2")):
        run_ranks(ranks, run, recipe, layers, f"grid.data={ranks}", f"output={tmp_path / name}")
    plain, recorded = (
        [line.rpartition(",")[0] for line in file.read_text().splitlines()]  # but the seconds
        for file in (tmp_path / name / "epochs.csv" for name in ("plain", "recorded"))
    )
    assert recorded == plain


CUT = ["grid.depth=2", "grid.data=2"]
SLABS = [
    "grid.depth=2 memory=offload",
    "grid.height=2 memory=tile",
    "grid.width=2 memory=recompute",
]


@pytest.mark.parametrize("options", in_gate([*CUT, *SLABS], kept=SLABS[:1]))
def test_ranks_record_what_one_records_and_are_not_changed(
    tmp_path: Path, universes: Path, serial: Path, options: str
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=1), tmp_path / "run"
    overrides = options.split()
    start = run_over_slabs if options in SLABS else run
    run_ranks(2, start, recipe, "layers=2", *overrides)
    run_ranks(2, start, recipe, f"output={out}-plain", *overrides)
    assert losses(out) == losses(Path(f"{out}-plain"))
    found, expected = numbers(out), numbers(serial.with_suffix(""))[:10]
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    # A weight or a mean may be nothing but rounding errors.
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(found[:5], expected[:5], rtol=1e-5, atol=1e-6)


def test_float16_and_accumulation(tmp_path: Path, universes: Path, serial: Path) -> None:
    """Gradients are divided by the scale, and are those of all mini-batches, before clipping."""
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=1), tmp_path / "run"
    first = numbers(serial.with_suffix(""))[:5]
    gradient = LAYER_COLUMNS.index("gradient") - 3
    run(recipe, "layers=1", "precision=bf16", "optimizer.clip=1e-3", f"output={out}-bf16")
    run(recipe, "layers=1", "precision=float16", f"output={out}-float16")
    for kind in ("bf16", "float16"):
        found = numbers(Path(f"{out}-{kind}"))[:5]
        np.testing.assert_allclose(found, first, rtol=0.03, atol=0.01)
        assert len(history(Path(f"{out}-{kind}"))) == 3 * 5
    data = {"data.batch_size": 2, "optimizer.accumulate": 2, "model.batch_norm": False}
    options = [f"{key}={value}" for key, value in data.items()]
    run(recipe, "layers=1", "model.batch_norm=false", "model.dropout=0", f"output={out}-whole")
    run(recipe, "layers=1", *options, "model.dropout=0", f"output={out}-parts")
    whole, parts = (numbers(Path(f"{out}-{name}"))[:5] for name in ("whole", "parts"))
    np.testing.assert_allclose(parts[:, gradient], whole[:, gradient], rtol=1e-4, atol=1e-9)
    assert not np.allclose(parts[:2, 1], whole[:2, 1], rtol=1e-6), "the last mini-batch alone"


def test_a_resumed_run_has_every_step_once(
    tmp_path: Path, universes: Path, serial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=2), tmp_path / "run"
    original = Trainer.measure_layers

    def killed(self: Trainer, *arguments: Any) -> None:
        original(self, *arguments)
        if self.at.step == 4:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "measure_layers", killed)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, "layers=2", "checkpoint.every=1")
    assert {row["step"] for row in history(out)} == {"1", "3", "5"}
    run(recipe, "layers=2", "checkpoint.every=1", resume=True)
    assert [row["step"] for row in history(out)] == [row["step"] for row in history_of(serial)]
    np.testing.assert_allclose(numbers(out), numbers(serial.with_suffix("")), rtol=1e-6)
    run(recipe, "layers=null", "epochs=3", resume=True)
    assert len(history(out)) == 15, "the rows that are there stay"


def history_of(recipe: Path) -> list[dict[str, str]]:
    return history(recipe.with_suffix(""))


def test_rows_of_steps_that_are_done_again_go_though_no_more_are_recorded(
    tmp_path: Path, universes: Path
) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=1), tmp_path / "run"
    run(recipe, "layers=2")
    file = HistoryFile(out / LAYERS, LAYER_COLUMNS, before=10)
    # After the checkpoint, as if it was killed.
    file.add({"step": 5, "layer": "head.fc3", "use": 1})
    file.close()
    run(recipe, "layers=null", "epochs=2", resume=True)
    assert {row["step"] for row in history(out)} == {"1", "3"}


def test_a_profile_has_no_recorded_steps(tmp_path: Path, universes: Path) -> None:
    recipe, out = write_recipe(tmp_path / "run.yaml", universes, epochs=2), tmp_path / "run"
    policy = ProfilePolicy(warm_up=0, steps=1)
    train(load_recipe(recipe, ["layers=1"]), profile=policy)
    (profile,) = read_profiles(out)
    (profiled,) = (step.step for step in profile.steps)
    recorded = {int(row["step"]) for row in history(out)}
    assert recorded == set(range(profiled + 1, 7)) != set()


@pytest.mark.parametrize("value", ["-1", "0", "x", "1.5"])
def test_a_bad_number_is_one_error(tmp_path: Path, universes: Path, value: str) -> None:
    with pytest.raises(RecipeError, match=r"bad value .* for 'layers'") as found:
        load_recipe(write_recipe(tmp_path / "run.yaml", universes), [f"layers={value}"])
    assert len(str(found.value).splitlines()) == 1


def test_a_network_that_is_cut_in_no_place_of_a_recipe() -> None:
    """Cut tensors and ordinary ones beside each other, on one rank, in float64."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv3d(1, 2, 3), nn.Flatten(), nn.Linear(16, 2)).double()
    x = torch.randn(3, 1, 4, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        expected = layer_rows(plain, lambda: plain(x))
        grid = hs.Grid()
        cut = hs.parallelize(plain, grid)
        assert layer_rows(cut, lambda: cut(hs.shard(x, grid))) == expected
