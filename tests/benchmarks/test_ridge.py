"""The ridge regression that controls networks, on volumes made to order (tier: no process)."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import ridge
import torch
from regression_control import PENALTIES, fit_ridge
from ridge import read_samples, split_of
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from summary_statistics import SETS, summary_statistics

import hyperslab as hs
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.studies.configurations import read_scored
from hyperslab.train.builders import open_data
from tests.selection import in_gate

WIDTH = 6
FEW, MANY = 10, 30
"""Universes: to look at, and to learn from."""

NAMES = ["clumping", "nothing"]


@pytest.fixture(scope="module")
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Universes whose first target is in the clumping of counts; their second is in nothing."""
    folder = tmp_path_factory.mktemp("universes")
    random = np.random.default_rng(0)
    for i in range(getattr(request, "param", FEW)):
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


def test_moments_are_those_of_numpy() -> None:
    field = np.random.default_rng(0).gamma(2, 1, (2, 3, 4, 4, 4))
    found = hs.models.summary_statistics.moments(torch.from_numpy(field))
    z = (field[1, 2] - field[1, 2].mean()) / field[1, 2].std()
    expected = [field[1, 2].mean(), np.log(field[1, 2].std()), (z**3).mean(), (z**4).mean() - 3]
    np.testing.assert_allclose(found[1, 2], expected)


def test_sets_are_finite_and_those_of_networks() -> None:
    counts = np.random.default_rng(0).poisson(2, (2, 2, 8, 8, 8)).astype(np.int16)
    parts = summary_statistics(counts)
    assert {name for own in SETS.values() for name in own} == set(parts)
    assert all(np.isfinite(part).all() for part in parts.values())
    flat = summary_statistics(np.ones_like(counts))
    assert all(np.isfinite(part).all() for part in flat.values())
    measures = hs.models.summary_statistics
    network = measures.summary_statistics(torch.log1p(torch.tensor(counts)), 8)
    shapes = {"power": (2, 9), "cross": (1, 9), "contrast": (3, 9), "distribution": (2, 3, 28)}
    of = {name: torch.from_numpy(parts[name]).unflatten(1, n) for name, n in shapes.items()}
    of_contrast = [of["contrast"][:, ::2], of["contrast"][:, 1:2]]  # of a channel, and of two
    expected = [torch.from_numpy(parts["moments"]).unflatten(1, (2, 4))[..., 2:]]
    for auto, cross in ([of["power"], of["cross"]], of_contrast):
        expected += [measures.mean_and_steps(auto), cross]
    expected.append(measures.mean_and_steps(of["distribution"]))
    found = torch.cat([part.flatten(1) for part in expected], 1)
    smoothed = network.shape[1] - found.shape[1]  # follows the shape of the distribution
    torch.testing.assert_close(torch.cat([network[:, :4], network[:, 4 + smoothed :]], 1), found)


def test_a_line_is_found_and_noise_is_not() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 50))
    y = np.stack([x[:, 0] - 2 * x[:, 1] + 5, random.normal(size=400)], axis=1)
    parts = np.split(np.arange(400), [60, 200])
    split = dict(zip(["train", "validation", "test"], parts, strict=True))
    found = fit_ridge({"few": x[:, 1:20], "all": x}, y, split)
    error = np.mean((found.predicted - y)[split["test"]] ** 2, axis=0) / y.var(axis=0)
    assert error[0] < 1e-6
    assert 0.9 < error[1] < 1.15  # without a penalty 60 samples and 50 numbers make it about 6
    assert found.chosen[0] == ("all", PENALTIES[0])


def test_a_ridge_is_that_of_scikit_learn_with_the_best_penalty() -> None:
    random = np.random.default_rng(1)
    x = random.normal(3, 2, (90, 40)) * np.logspace(-3, 3, 40)
    x[:, 5] = 7
    y = x[:, :3] / x[:, :3].std(0) + random.normal(size=(90, 3))
    split = {"train": np.arange(0, 50), "validation": np.arange(50, 70), "test": np.arange(70, 90)}
    found = fit_ridge({"x": x}, y, split)
    for target, (_, penalty) in enumerate(found.chosen):
        model = make_pipeline(StandardScaler(), Ridge(alpha=50 * penalty))
        expected = model.fit(x[:50], y[:50, target]).predict(x)
        np.testing.assert_allclose(found.predicted[:, target], expected, rtol=1e-7)
        errors = [
            np.mean(
                (
                    model.set_params(ridge__alpha=50 * p)
                    .fit(x[:50], y[:50, target])
                    .predict(x[50:70])
                    - y[50:70, target]
                )
                ** 2
            )
            for p in PENALTIES
        ]
        assert PENALTIES[np.argmin(errors)] == penalty


@pytest.mark.parametrize("width", in_gate([None, 3], kept=[3]))
def test_splits_are_those_of_training(recipe: Recipe, width: int | None) -> None:
    samples = read_samples(recipe, width)
    count = FEW * (8 if width else 1)
    assert [len(numbers) for numbers in samples.sets.values()] == [count] * len(SETS)
    split = split_of(samples.source, recipe, recipe.data.seed)
    data = recipe.data.model_copy(update={"subvolume": width})
    cut = recipe.model_copy(update={"data": data})
    for which, chosen in split.items():
        with open_data(cut, hs.Grid(), split=which, shuffle=False) as opened:
            assert [samples.names[i] for i in chosen] == opened.names(0)
            targets = np.concatenate([y.full().numpy() for _, y in opened.epoch(0)])
        np.testing.assert_allclose(samples.targets[chosen], targets)


def test_listed_splits_are_those_of_training(recipe: Recipe) -> None:
    words = {"train": ("0:4",), "validation": ("4:7",), "test": ("7:10",)}
    listed = recipe.model_copy(update={"data": recipe.data.model_copy(update=words)})
    split = split_of(read_samples(listed, None).source, listed, 3)
    assert {which: len(chosen) for which, chosen in split.items()} == {
        "train": 4,
        "validation": 3,
        "test": 3,
    }


def test_statistics_are_kept_and_belong_to_their_volumes(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "statistics.npz"
    first = read_samples(recipe, None, kept)

    computed = []

    def counted(counts: np.ndarray) -> dict[str, np.ndarray]:
        computed.append(len(counts))
        return summary_statistics(counts)

    monkeypatch.setattr(ridge, "summary_statistics", counted)
    again = read_samples(recipe, None, kept)
    assert computed == [1]
    assert again.names == first.names
    assert np.array_equal(again.targets, first.targets)
    for name, numbers in first.sets.items():
        assert np.array_equal(again.sets[name], numbers)
    others = recipe.data.model_copy(update={"targets": ("nothing",)})
    for changed, width in [(recipe.model_copy(update={"data": others}), None), (recipe, 3)]:
        with pytest.raises(hs.DataError, match=r"statistics\.npz has the statistics of other"):
            read_samples(changed, width, kept)
    monkeypatch.setattr(ridge, "summary_statistics", lambda counts: summary_statistics(counts + 1))
    with pytest.raises(hs.DataError, match="or others; name another file"):
        read_samples(recipe, None, kept)
    monkeypatch.undo()
    content = kept.read_bytes()
    with np.load(kept) as file:
        parts = dict(file)
    for name, other in {"power": np.float32(1), "cross": parts["cross"][:-1]}.items():
        np.savez(kept, **{**parts, name: other})
        with pytest.raises(hs.DataError, match="or others; name another file"):
            read_samples(recipe, None, kept)
    lone, objects = io.BytesIO(), io.BytesIO()
    np.save(lone, parts["power"])
    np.savez(objects, **{**parts, "power": np.array([{}])})
    for damaged in (b"", content[:999], b"words", lone.getvalue(), objects.getvalue()):
        kept.write_bytes(damaged)
        with pytest.raises(hs.DataError, match=r"statistics\.npz: cannot be read as statistics"):
            read_samples(recipe, None, kept)


def test_a_folder_for_statistics_is_made(recipe: Recipe, tmp_path: Path) -> None:
    kept = tmp_path / "new" / "statistics.npz"
    read_samples(recipe, None, kept)
    assert kept.exists()


@pytest.mark.long
@pytest.mark.parametrize("recipe", [MANY], indirect=True)
def test_the_command_writes_a_table_and_predictions(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert recipe.data.path is not None
    arguments = [str(recipe.data.path / "recipe.yaml"), "--subvolume", "3", "--splits", "2"]
    out = ["--json", str(tmp_path / "ridge.json"), "--out", str(tmp_path / "out")]
    out += ["--features", str(tmp_path / "statistics.npz")]
    monkeypatch.setattr(sys, "argv", ["ridge.py", *arguments, *out])
    ridge.main()
    found = json.loads((tmp_path / "ridge.json").read_text())
    assert found["seeds"] == [3, 4]
    files = {path.name for path in tmp_path.glob("*.npz")}
    assert files == {"statistics.npz", "statistics-3.npz"}
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
        assert metrics["ridge"]["clumping"]["statistics"] in SETS
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
