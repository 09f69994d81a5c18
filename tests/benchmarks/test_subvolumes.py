"""Whole volumes against their parts, by heads on statistics (tier: no process)."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import head
import numpy as np
import pytest
import subvolumes
import torch
from kept import Kept
from regression_control import fit_ridge
from subvolumes import rated, read_universes, treated, volumes_of, without_long_modes

import hyperslab as hs
from hyperslab.geometry import Box
from hyperslab.models import summary_statistics as measures
from hyperslab.recipe.load import load_recipe, save_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.train.builders import open_data
from hyperslab.train.evaluate import evaluate
from tests.train.universes import write_universes

FEW = replace(head.AS_SHIPPED, steps=40, degree=1, batch=4, members=1, plain=0, moved=0.0)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = write_universes(tmp_path_factory.mktemp("data") / "universes", 20, width=8)
    path = folder / "recipe.yaml"
    path.write_text(
        "model: {name: multiscale, channels: [], summary_statistics: true, hidden: 40}\n"
        f"data: {{path: {folder}, batch_size: 4, train: '0:10', validation: '10:15', "
        f"test: '15:20'}}\noutput: {folder / 'run'}\n"
    )
    return load_recipe(path)


def of_parts(recipe: Recipe) -> Recipe:
    """Whose samples are the eighths; its splits are lists of them."""
    assert recipe.data.path is not None
    splits = ["data.train=0:80", "data.validation=80:120", "data.test=120:160"]
    return load_recipe(recipe.data.path / "recipe.yaml", ["data.subvolume=4", *splits])


def test_cubes_are_the_samples_of_subvolumes(recipe: Recipe) -> None:
    with (
        open_data(recipe, hs.Grid(), split="all") as whole,
        open_data(of_parts(recipe), hs.Grid(), split="all") as cut,
    ):
        box = Box.whole(whole.source.shape)
        counts = np.stack([whole.source.read(volume, box) for volume in (0, 1)])
        for place, cube in enumerate(head.cubes(counts, 4)):
            assert np.array_equal(cube, cut.source.read(place, Box.whole(cut.source.shape)))


def test_rates_widen_until_the_best_is_inside() -> None:
    rates = rated(lambda rate: abs(np.log(rate / 1e-5)))
    best = min(rates, key=rates.__getitem__)
    assert best == pytest.approx(1e-3 / 3**4)
    assert min(rates) < best < max(rates) == 9e-3
    assert list(rates) == sorted(rates)
    assert len(rated(lambda rate: -rate)) == subvolumes.MOST_RATES  # there is no best


@pytest.mark.long
def test_parts_are_averaged_and_recalibrated_over_their_volumes(
    recipe: Recipe, tmp_path: Path
) -> None:
    """Errors are those of the shipped network on cut volumes, as `hyperslab evaluate` has them."""
    data = read_universes(recipe, Kept(tmp_path / "kept", Kept(tmp_path)), 4)
    assert data.parts == 8
    assert {key: len(chosen) for key, chosen in data.split.items()} == {
        "train": 80,
        "validation": 40,
        "test": 40,
    }
    net = head.trained(data, recipe, 80, 0, replace(FEW, counts=()), Kept(tmp_path, Kept(tmp_path)))
    hs.save(tmp_path / "run" / "checkpoints" / "head", net)
    save_recipe(of_parts(recipe), tmp_path / "run" / "recipe.yaml")
    found = evaluate(tmp_path / "run", checkpoint="head", calibrate=True)
    (alone, averaged, better) = treated(data, head.said_of(net, data.features)).values()
    for key, errors in enumerate(found.errors.values()):
        of, predicted = alone
        assert errors["mse"] == pytest.approx(head.squares(of, predicted, "test")[key].mean(), 1e-4)
    for key, errors in enumerate(found.facts["recalibrated"]["parameters"].values()):
        of, predicted = better
        assert errors["mse"] == pytest.approx(head.squares(of, predicted, "test")[key].mean(), 1e-4)
    assert averaged[1].shape == (20, 4)


def test_statistics_of_volumes_are_the_means_of_their_parts(recipe: Recipe, tmp_path: Path) -> None:
    data = read_universes(recipe, Kept(tmp_path / "kept", Kept(tmp_path)), 4)
    whole = volumes_of(data)
    np.testing.assert_allclose(whole.features[1], data.features[8:16].mean(0))
    assert whole.split["test"].tolist() == list(range(15, 20))
    assert np.array_equal(whole.targets, data.targets[::8])
    assert {name: one.shape for name, one in whole.sets.items()} == {
        name: (20, one.shape[1]) for name, one in data.sets.items()
    }
    # of 64 parts of a volume eight train, and all are averaged
    smaller = read_universes(recipe, Kept(tmp_path / "kept", Kept(tmp_path)), 2)
    assert smaller.split["train"][:9].tolist() == [*range(0, 64, 8), 64]
    assert len(smaller.split["test"]) == 5 * 64
    assert volumes_of(smaller).split["train"].tolist() == list(range(10))
    np.testing.assert_allclose(volumes_of(smaller).features[1], smaller.features[64:128].mean(0))


def test_long_modes_are_taken_out_of_spectra_alone(recipe: Recipe, tmp_path: Path) -> None:
    data = read_universes(recipe, Kept(tmp_path / "kept", Kept(tmp_path)), None)
    short = without_long_modes(data, 4)
    with open_data(recipe, hs.Grid(), split="all") as opened:
        counts = opened.source.read(0, Box.whole(opened.source.shape))
    x = torch.log1p(torch.from_numpy(counts[None]).float())
    gone = np.flatnonzero((short.features[0] == 0) & (data.features[0] != 0))
    cross = [n for n, (i, j) in enumerate(measures.pairs_of(4)) if i != j]
    expected = []
    smoothed = measures.Modes.of(measures.contrast(x), 8).smoothed(0.5, 8)  # twice, as 8 is small
    for field in 2 * [torch.log(smoothed + measures.FLOOR)]:
        spectra = measures.Modes.of(field, 8).spectra(measures.OctaveBins(8))
        auto = measures.mean_and_steps(spectra[:, [n for n in range(10) if n not in cross]])
        moments = measures.mean_and_steps(measures.moments(field))
        expected += [moments.flatten(), auto[0, :, :3].flatten()]
    for field in (x, measures.contrast(x)):
        spectra = measures.Modes.of(field, 8).spectra(measures.OctaveBins(8))
        auto = measures.mean_and_steps(spectra[:, [n for n in range(10) if n not in cross]])
        expected += [auto[0, :, :3].flatten(), spectra[0, cross, :3].flatten()]
    # bins of a third of an octave that have no mode are 0 in both
    found = torch.cat(expected).numpy()
    np.testing.assert_allclose(data.features[0, gone], found[found != 0], rtol=1e-5, atol=1e-6)
    rest = short.features != 0
    assert np.array_equal(short.features[rest], data.features[rest])


@pytest.mark.long
def test_the_command_goes_on_and_compares_with_the_whole(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recipe.data.path is not None
    monkeypatch.setattr(subvolumes, "AS_SHIPPED", FEW)
    arguments = [str(recipe.data.path / "recipe.yaml"), "--kept", str(tmp_path / "kept")]
    arguments += ["--widths", "4", "--seeds", "3", "4", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["subvolumes.py", *arguments, "--dry-run"])
    subvolumes.main()
    assert not (tmp_path / "kept").exists()
    monkeypatch.setattr(sys, "argv", ["subvolumes.py", *arguments])
    subvolumes.main()
    record = json.loads((tmp_path / "found.json").read_text())
    by_name = {one["name"]: one for one in record["configurations"]}
    assert {name: (one["batch"], one["steps"]) for name, one in by_name.items()} == {
        "8": (4, 40),
        "8, no modes longer than 4": (4, 40),
        "4": (32, 40),
        "4, equal samples": (4, 320),
        "statistics of 4, averaged": (4, 40),
    }
    heads = record["budget"]["heads"]
    tried = [rate["rate"] for one in record["configurations"] for rate in one["rates"]]
    assert heads["timed"] == len(tried) + 5  # a second seed of each
    assert heads["unforeseen"] == len(tried) - 15  # three rates are foreseen
    rows = {row["name"]: row for row in record["rows"]}
    made = ["", ", averaged", ", averaged and recalibrated"]
    short = "8, no modes longer than 4"
    networks = ["8", short, *(f"4{one}" for one in made), "statistics of 4, averaged"]
    networks += [f"4, equal samples{one}" for one in made]
    ridges = [
        "ridge, 8",
        f"ridge, {short}",
        *(f"ridge, 4{one}" for one in made),
        "ridge, statistics of 4, averaged",
    ]
    assert list(rows) == networks + ridges
    assert [row["seeds"] for row in rows.values()] == [2] * 9 + [1] * 6
    assert rows["8"]["to_reference"]["mean"] is rows["ridge, 8"]["to_reference"]["mean"] is None
    whole = read_universes(recipe, Kept(tmp_path / "kept", Kept(tmp_path)), None)
    ridge = fit_ridge(whole.sets, whole.targets, whole.split).predicted
    of_mean = (whole.targets[:10].mean(0) - whole.targets[15:]) ** 2
    expected = ((ridge[15:] - whole.targets[15:]) ** 2).mean(0) / of_mean.mean(0)
    found = [rows["ridge, 8"]["ratio"][name]["value"] for name in record["parameters"]]
    np.testing.assert_allclose(found, expected)
    pair = (rows[name]["ratio"]["H_0"]["value"] for name in ("ridge, 4", "ridge, 8"))
    above, below = pair
    assert rows["ridge, 4"]["to_reference"]["H_0"]["value"] == pytest.approx(above / below)

    def none(*_: object) -> None:
        raise AssertionError("it was there")

    monkeypatch.setattr(head, "train_head", none)
    monkeypatch.setattr(head, "fit_ridge", none)
    monkeypatch.setattr(head, "cubes", none)
    subvolumes.main()
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == record["rows"]
