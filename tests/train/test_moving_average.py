"""`ema` in a recipe: what is validated, kept and used (tiers: no process; two gloo ranks)."""

from __future__ import annotations

import csv
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperslab.checkpoint.files import verify_checksums
from hyperslab.checkpoint.retention import latest
from hyperslab.checkpoint.save_load import read_extra_values
from hyperslab.errors import Stopped
from hyperslab.train.evaluate import evaluate
from hyperslab.train.moving_average import MovingAverage
from hyperslab.train.trainer import Progress
from tests.ranks import run_ranks
from tests.train.universes import losses, narrow_network, run, write_recipe


def test_the_average_is_that_of_all_weights_so_far() -> None:
    net = torch.nn.BatchNorm1d(2)
    average = MovingAverage(net, 0.5)
    history = [net.weight.detach().clone()]
    for step in (1, 2, 3):
        net.weight.data += step
        net.running_mean += 1
        net.num_batches_tracked += 1
        average.update(step)
        history.append(net.weight.detach().clone())
    expected = history[0]
    for step, weight in enumerate(history[1:], 1):
        d = min(0.5, (1 + step) / (10 + step))
        expected = d * expected + (1 - d) * weight
    torch.testing.assert_close(average.values["weight"], expected)
    assert "num_batches_tracked" not in average.values
    own = net.weight.detach().clone()
    with average.in_place():
        assert torch.equal(net.weight, average.values["weight"])
        assert torch.equal(net.running_mean, average.values["running_mean"])
    assert torch.equal(net.weight, own)


@pytest.mark.parametrize("kind", [torch.complex64, torch.bfloat16, torch.float64], ids=str)
def test_weights_of_every_kind_are_averaged(kind: torch.dtype) -> None:
    net = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.ones(3, dtype=kind))})
    average = MovingAverage(net, 0.999)
    net["w"].data.fill_(1.5)
    for step in range(1, 401):
        average.update(step + 10_000)
    expected = 1.5 - 0.5 * 0.999**400
    with average.in_place():
        assert net["w"].dtype == kind
        assert torch.allclose(
            net["w"].to(torch.complex128).real, torch.tensor(expected).double(), rtol=5e-3
        )


def of(folder: Path, key: str) -> list[float]:
    with (folder / "epochs.csv").open() as file:
        return [float(row[key]) for row in csv.DictReader(file)]


def averages(folder: Path) -> dict[str, torch.Tensor] | None:
    path = latest(folder)
    assert path is not None
    return read_extra_values(path, verify_checksums(path)).get("ema")


def test_steps_are_the_same_and_validations_are_of_the_average(
    tmp_path: Path, universes: Path
) -> None:
    plain = write_recipe(tmp_path / "plain.yaml", universes)
    averaged = write_recipe(tmp_path / "averaged.yaml", universes, ema=0.9)
    run(plain)
    run(averaged)
    assert losses(tmp_path / "plain") == losses(tmp_path / "averaged")
    before, after = (of(tmp_path / name, "validation_loss") for name in ("plain", "averaged"))
    assert before != after
    assert averages(tmp_path / "plain") is None
    with narrow_network():
        found = evaluate(tmp_path / "averaged", checkpoint="latest", split="validation")
    assert found.facts["mean"]["mse"] == pytest.approx(after[-1], rel=1e-5)


def stopped_in_validation(recipe: Path) -> None:
    original = Progress.vote
    seen = []

    def raising(self: Progress, *args: Any) -> Any:
        seen.append(self.at.epoch)
        if len(seen) == 2:
            signal.raise_signal(signal.SIGUSR1)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "vote", raising)
        with pytest.raises(Stopped):
            run(recipe)


def test_stopped_within_a_validation_and_gone_on_with(tmp_path: Path, universes: Path) -> None:
    whole = write_recipe(tmp_path / "whole.yaml", universes, ema=0.9)
    cut = write_recipe(tmp_path / "cut.yaml", universes, ema=0.9)
    run(whole)
    stopped_in_validation(cut)
    run(cut, resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    ours, theirs = averages(tmp_path / "cut"), averages(tmp_path / "whole")
    assert ours is not None
    assert theirs is not None
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def on_two_ranks(recipe: Path) -> None:
    run(recipe, "grid.depth=2", "output=" + str(recipe.with_name("two")))


def test_the_average_is_that_of_one_rank_on_every_grid(tmp_path: Path, universes: Path) -> None:
    recipe = write_recipe(tmp_path / "one.yaml", universes, ema=0.9, epochs=2)
    run(recipe)
    run_ranks(2, on_two_ranks, recipe)
    assert of(tmp_path / "two", "validation_loss") == pytest.approx(
        of(tmp_path / "one", "validation_loss"), rel=1e-3
    )
