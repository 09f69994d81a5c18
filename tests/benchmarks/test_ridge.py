"""The ridge regression that controls networks, on volumes made to order (tier: no process)."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import ridge
from regression_control import ridge_predictions
from ridge import read_samples, split_of
from summary_statistics import moments, power, shells, summary_statistics

import hyperslab as hs
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.studies.report.configurations import read_scored
from hyperslab.train.builders import open_data
from tests.selection import in_gate

WIDTH = 6
UNIVERSES = 30
NAMES = ["clumping", "nothing"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Universes whose first target is in the clumping of counts; their second is in nothing."""
    folder = tmp_path_factory.mktemp("universes")
    random = np.random.default_rng(0)
    for i in range(UNIVERSES):
        target = random.uniform(-1, 1, 2)
        clumps = random.lognormal(0, 0.6 + 0.3 * target[0], (WIDTH, WIDTH, WIDTH, 2))
        with h5py.File(folder / f"univ_ics_{i}.hdf5", "w") as file:
            file["full"] = random.poisson(30 * clumps / clumps.mean()).astype(np.int16)
            file["unitPar"] = target
            file["physPar"] = [0.3, 70] + target * [0.1, 7]
            file["namePar"] = np.array(NAMES, dtype="S")
    path = folder / "recipe.yaml"
    words = f"data: {{path: {folder}, batch_size: 4, seed: 3, fractions: [0.6, 0.2, 0.2]}}"
    path.write_text(f"{words}\noutput: {folder / 'run'}\n")
    return load_recipe(path, ["data.transform=null"])


@pytest.mark.parametrize("width", [5, 8])
def test_power_of_all_modes_is_the_variance(width: int) -> None:
    field = np.random.default_rng(0).normal(3, 2, (2, 3, width, width, width))
    modes = shells(width)[1]
    assert modes.sum() == width**3 - 1
    np.testing.assert_allclose((power(field) * modes).sum(-1), field.var((2, 3, 4)))


def test_a_wave_has_its_power_in_its_bin() -> None:
    wave = np.cos(2 * np.pi * 3 * np.arange(8) / 8)
    spectra = power(np.broadcast_to(wave[:, None], (1, 1, 8, 8, 8)))[0, 0]
    shell = shells(8)[0]
    (expected,) = {shell[3], shell[3 * 5]}  # k = 3 along the last and along the dim before
    assert np.flatnonzero(spectra > 1e-12).tolist() == [expected]


def test_moments_are_those_of_numpy() -> None:
    field = np.random.default_rng(0).gamma(2, 1, (2, 3, 4, 4, 4))
    z = (field[1, 2] - field[1, 2].mean()) / field[1, 2].std()
    expected = [field[1, 2].mean(), np.log(field[1, 2].std()), (z**3).mean(), (z**4).mean() - 3]
    np.testing.assert_allclose(moments(field)[1, 2], expected)


def test_statistics_do_not_change_with_the_direction_and_are_finite() -> None:
    counts = np.random.default_rng(0).poisson(2, (1, 2, 6, 6, 6)).astype(np.int16)
    turned = np.roll(counts.transpose(0, 1, 4, 2, 3)[:, :, ::-1], 2, axis=3)
    np.testing.assert_allclose(summary_statistics(turned), summary_statistics(counts), rtol=1e-9)
    assert np.isfinite(summary_statistics(np.ones_like(counts))).all()


def test_a_line_is_found_and_noise_is_not() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 50))
    y = np.stack([x[:, 0] - 2 * x[:, 1] + 5, random.normal(size=400)], axis=1)
    parts = np.split(np.arange(400), [60, 200])
    split = dict(zip(["train", "validation", "test"], parts, strict=True))
    predicted = ridge_predictions(x, y, split)
    error = np.mean((predicted - y)[split["test"]] ** 2, axis=0) / y.var(axis=0)
    assert error[0] < 1e-6
    assert 0.9 < error[1] < 1.15  # without a penalty 60 samples and 50 numbers make it about 6


@pytest.mark.parametrize("width", in_gate([None, 3], kept=[3]))
def test_splits_are_those_of_training(recipe: Recipe, width: int | None) -> None:
    samples = read_samples(recipe, width)
    assert samples.statistics.shape[0] == UNIVERSES * (8 if width else 1)
    split = split_of(samples.volumes, recipe, recipe.data.seed)
    data = recipe.data.model_copy(update={"subvolume": width})
    cut = recipe.model_copy(update={"data": data})
    for which, chosen in split.items():
        with open_data(cut, hs.Grid(), split=which, shuffle=False) as opened:
            assert [samples.names[i] for i in chosen] == opened.names(0)
            targets = np.concatenate([y.full().numpy() for _, y in opened.epoch(0)])
        np.testing.assert_allclose(samples.targets[chosen], targets)


def test_the_command_writes_a_table_and_predictions(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert recipe.data.path is not None
    arguments = [str(recipe.data.path / "recipe.yaml"), "--subvolume", "3", "--splits", "2"]
    out = ["--json", str(tmp_path / "ridge.json"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["ridge.py", *arguments, *out])
    ridge.main()
    found = json.loads((tmp_path / "ridge.json").read_text())
    assert found["seeds"] == [3, 4]
    assert list(found["rows"]) == ["whole", "3", "3-averaged"]
    assert [row["tests"] for row in found["rows"].values()] == [6, 48, 6]
    whole, single, mean = (row["ratios"]["clumping"] for row in found["rows"].values())
    assert max(whole) < 0.4
    assert max(mean) < min(single)
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]} == {
        *found["rows"]
    }
    for name, tests in {"whole": 6, "3": 48}.items():
        metrics = json.loads((tmp_path / "out" / name / "metrics.json").read_text())
        control, _ = read_scored("ridge", [tmp_path / "out" / name])  # as the report reads it
        assert control.parameters == tuple(NAMES)
        ratio = found["rows"][name]["ratios"]["clumping"][0]
        assert metrics["parameters"]["clumping"]["ratio"] == ratio
        with (tmp_path / "out" / name / "predictions.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == tests
        assert metrics["uncertainty"]["volumes"] == 6
        inside = metrics["uncertainty"]["parameters"]["clumping"]["coverage_68"]
        off = [float(row["predicted_clumping"]) - float(row["true_clumping"]) for row in rows]
        (deviation,) = {float(row["std_clumping"]) for row in rows}
        assert inside == np.mean(np.abs(off) <= 0.9944578832 * deviation)
        physical = float(rows[0]["std_phys_nothing"])
        assert physical == pytest.approx(7 * float(rows[0]["std_nothing"]))
    scored, averaged = read_scored("ridge", [tmp_path / "out" / "3"])
    assert scored.ratio("clumping").value == pytest.approx(single[0])
    assert scored.coverages(0.68) is not None
    assert averaged is not None
    assert averaged.coverages(0.68) is None
    assert metrics["recalibrated"]["parameters"]["clumping"]["ratio"] == mean[0]
