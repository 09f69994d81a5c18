"""Heads on statistics, as the closed forms and the whole network say (tier: no process)."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import head
import numpy as np
import pytest
import torch
from head import FoldedLayer, LinearLayer, Training, Universes, products
from regression_control import fit_ridge
from sklearn.linear_model import Ridge

import hyperslab as hs
from hyperslab.losses import gaussian_moments
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.train.evaluate import evaluate

WIDTH = 4
COUNT = 40


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Universes whose targets are in the number of counts and in their clumping."""
    folder = tmp_path_factory.mktemp("universes")
    random = np.random.default_rng(0)
    for i in range(COUNT):
        target = random.uniform(-1, 1, 2)
        clumps = random.lognormal(0, 0.6 + 0.3 * target[0], (WIDTH, WIDTH, WIDTH, 2))
        with h5py.File(folder / f"univ_ics_{i:02}.hdf5", "w") as file:
            file["full"] = random.poisson((30 + 9 * target[1]) * clumps).astype(np.int16)
            file["unitPar"] = target
            file["physPar"] = [0.3, 70] + target * [0.1, 7]
            file["namePar"] = np.array(["clumping", "number"], dtype="S")
    path = folder / "recipe.yaml"
    path.write_text(
        "model: {name: multiscale, channels: [], summary_statistics: true, hidden: 24}\n"
        f"data: {{path: {folder}, batch_size: 4, train: '0:24', validation: '24:32', "
        f"test: '32:40'}}\noutput: {folder / 'run'}\n"
    )
    return load_recipe(path)


def curved(samples: int = 600) -> Universes:
    """Features in which a target lies along a line that bends; the other one is straight."""
    random = np.random.default_rng(0)
    y = random.uniform(-1, 1, (samples, 2))
    bent = np.stack([y[:, 0] + 0.6 * y[:, 0] ** 3, y[:, 1]], 1)
    x = bent @ random.normal(size=(2, 12)) + 0.2 * random.normal(size=(samples, 12))
    parts = np.split(np.arange(samples), [samples // 2, 3 * samples // 4])
    split = dict(zip(("train", "validation", "test"), parts, strict=True))
    return Universes(("a", "b"), (1, 4, 4, 4), y, x, {"network": x}, split)


def test_a_linear_layer_is_a_ridge_and_leaves_each_sample_out() -> None:
    random = np.random.default_rng(1)
    x = random.normal(2, 3, (30, 8)) * np.arange(1, 9)
    x[:, 3] = 5  # the same in all
    y = np.stack([x[:, 0] + random.normal(size=30), random.normal(size=30)], 1)
    layer = LinearLayer(x, y, (0.5,))
    scaled = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1) ** 0.5
    scaled /= np.sqrt(scaled.var(0).mean())
    for target, (_, _, penalty) in enumerate(layer.chosen):
        model = Ridge(alpha=30 * penalty).fit(scaled, y[:, target])
        np.testing.assert_allclose(layer(x)[:, target], model.predict(scaled), rtol=1e-7)
        np.testing.assert_allclose(layer.seen[:, target], model.predict(scaled), rtol=1e-7)
        rest = np.arange(1, 30)
        without = Ridge(alpha=30 * penalty).fit(scaled[rest], y[rest, target])
        expected = without.predict(scaled[:1])
        np.testing.assert_allclose(layer.left_out[:1, target], expected, rtol=1e-7)
    assert layer.chosen[0][2] < layer.chosen[1][2]  # nothing is known of the second


@pytest.mark.long
def test_parts_of_a_volume_are_left_out_together() -> None:
    random = np.random.default_rng(3)
    y = np.repeat(random.normal(size=(48, 2)), 4, axis=0)
    x = np.repeat(random.normal(size=(48, 9)), 4, axis=0) * np.arange(9)  # the first is constant
    x += 0.1 * random.normal(size=x.shape) * np.arange(9)
    x[:, 1] += y[:, 0]
    layer = FoldedLayer(x, y, (1.0, 0.5), (4, 9), np.arange(192) // 4)
    fold = np.arange(192) // 4 % 8
    errors = {}
    standard = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1)
    for count in (4, 9):
        for power in (1.0, 0.5):
            scaled = (
                standard[:, :count] * np.where(x.std(0) > 0, x.std(0) ** (1 - power), 0)[:count]
            )
            scaled *= np.sqrt(9 / scaled.var(0).sum())  # the mean over all features
            for penalty in head.PENALTIES:
                found = np.empty_like(y)
                for one in range(8):
                    rest = fold != one
                    model = Ridge(alpha=penalty * rest.sum(), fit_intercept=False)
                    model.fit(scaled[rest], (y - y.mean(0))[rest])
                    found[~rest] = model.predict(scaled[~rest]) + y.mean(0)
                for target, error in enumerate(np.mean((found - y) ** 2, 0)):
                    errors[target, count, power, float(penalty)] = error, found[:, target], scaled
    for target, chosen in enumerate(layer.chosen):
        best, left_out, scaled = errors[(target, *chosen)]
        assert best <= min(one[0] for key, one in errors.items() if key[0] == target) * (1 + 1e-9)
        np.testing.assert_allclose(layer.left_out[:, target], left_out, rtol=1e-6, atol=1e-9)
        model = Ridge(alpha=192 * chosen[2]).fit(scaled, y[:, target])
        np.testing.assert_allclose(layer(x)[:, target], model.predict(scaled), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(layer.seen[:, target], layer(x)[:, target], rtol=1e-9)
    # parts of a volume give its second target away, which is noise
    alone = LinearLayer(x, y).left_out
    assert np.mean((alone - y)[:, 1] ** 2) < 0.9 * np.mean((layer.left_out - y)[:, 1] ** 2)


@pytest.mark.long
def test_a_linear_layer_divides_by_the_power_that_leaves_out_best() -> None:
    random = np.random.default_rng(2)
    x = random.normal(size=(60, 100)) * np.logspace(0, -3, 100)
    y = np.stack([x[:, 0], x @ random.normal(size=100) / x.std(0).mean(), 1e3 * x[:, 99]], 1)
    y += 0.1 * random.normal(size=y.shape)
    both = LinearLayer(x, y, (1.0, 0.2))
    for target, (_, power, _) in enumerate(both.chosen):
        alone = LinearLayer(x, y, (power,))
        np.testing.assert_allclose(both(x)[:, target], alone(x)[:, target])
        off = [np.mean((LinearLayer(x, y, (p,)).left_out - y) ** 2, 0)[target] for p in (1.0, 0.2)]
        assert off[[1.0, 0.2].index(power)] == min(off)
    assert {power for _, power, _ in both.chosen} == {1.0, 0.2}


def test_products_are_those_of_targets() -> None:
    y = np.array([[2.0, 3.0]])
    assert products(y, 3).tolist() == [[2, 3, 4, 6, 9, 8, 12, 18, 27]]


ONE = {"members": 1, "plain": 0, "moved": 0.0}
FEW = Training(steps=400, rate=3e-3, decay=0.1, average=0.9, **ONE)


def test_what_is_kept_belongs_to_volumes_and_splits() -> None:
    data = curved()
    assert data.key == curved().key
    fewer = {**data.split, "validation": data.split["validation"][1:]}
    train, validation = data.split["train"], data.split["validation"]
    moved = {**data.split, "train": train[:-9], "validation": np.r_[train[-9:], validation]}
    assert replace(data, split=moved).key != data.key  # the same samples one after the other
    others = {"network": data.sets["network"], "first": data.features[:, :3]}
    keys = [data.key, replace(data, split=fewer).key, replace(data, sets=others).key]
    assert len({*keys, curved(601).key}) == 4


def shipped(data: Universes, outputs: int) -> hs.models.MultiscaleNet:
    """A network with as many features as ``data`` have; only its norm and its head are used."""
    net = hs.models.MultiscaleNet(1, outputs, channels=(), hidden=24).eval()
    net.norm = type(net.norm)(data.features.shape[1])
    net.head[0] = torch.nn.Linear(data.features.shape[1], 24)
    return net


def said(net: hs.models.MultiscaleNet, data: Universes) -> torch.Tensor:
    with torch.no_grad():
        return net.eval().head(net.norm(torch.tensor(data.features, dtype=torch.float32)))


def fitted(data: Universes, outputs: int, how: Training) -> hs.models.MultiscaleNet:
    """A network whose head is trained on all training samples."""
    net = shipped(data, outputs)
    train = data.split["train"]
    y = products(data.targets[train], how.degree)
    layer = LinearLayer(data.features[train], y, how.powers, how.counts)
    head.train_head(net, data, len(train), 0, how, layer)
    return net


def test_a_head_that_has_not_learnt_is_the_ridge() -> None:
    data = curved()
    train = data.split["train"]
    net = fitted(data, 2, Training(steps=40, rate=0.0, powers=(1.0,), counts=(), **ONE))
    layer = LinearLayer(data.features[train], data.targets[train])
    np.testing.assert_allclose(said(net, data), layer(data.features), atol=2e-6)


def test_a_head_learns_what_a_line_misses() -> None:
    data = curved()
    ridge = fit_ridge(data.sets, data.targets, data.split).predicted
    net = fitted(data, 2, FEW)
    test = data.split["test"]
    errors, of_ridge = (
        ((found - data.targets)[test] ** 2).mean(0) for found in (said(net, data).numpy(), ridge)
    )
    assert errors[0] < 0.8 * of_ridge[0]
    assert errors[1] < 1.1 * of_ridge[1]


def test_several_dense_networks_are_one_that_says_their_mean() -> None:
    inputs = torch.randn(5, 7)
    whole = shipped(curved(), 2).head
    curves = [head.dense(width, whole, 4, 0.0, 4) for width in (7, 3, 7, 2)]
    for curve in curves:
        torch.nn.init.normal_(curve[6].weight)
        torch.nn.init.normal_(curve[6].bias)
    made = head.averaged(curves, 7)
    assert made[0].out_features == 24 - 4
    means = torch.stack([curve(inputs[:, : curve[0].in_features]) for curve in curves]).mean(0)
    torch.testing.assert_close(made(inputs), means)
    with pytest.raises(hs.DataError, match=r"cannot share model\.hidden=24 evenly, of which 4"):
        head.dense(7, whole, 4, 0.0, 3)


def test_universes_are_moved_within_the_box_as_their_inputs_answer() -> None:
    random = np.random.default_rng(4)
    y = random.uniform([-1, 2], [1, 5], (300, 2))
    answer = products(y, 2) @ random.normal(size=(5, 6))
    response = head.Response.of(answer, y, np.array([2.0, 3.0]), 2)
    for far in (0.3, 100.0, math.inf):
        goal, step, base_step = response.moved(torch.tensor(y).float(), far)
        moved = goal.double().numpy()
        assert np.all((moved >= y.min(0) - 1e-5) & (moved <= y.max(0) + 1e-5))
        weight = response.weight.double().numpy()
        np.testing.assert_allclose(
            answer + step.numpy(),
            answer + (products(moved, 2) - products(y, 2)) @ weight,
            atol=1e-3,
        )
        np.testing.assert_allclose(
            products(y, 2) @ weight,
            answer - answer.mean(0) + (products(y, 2) @ weight).mean(0),
            atol=1e-3,
        )
        np.testing.assert_allclose(base_step, step[:, :2] * torch.tensor([2.0, 3.0]), rtol=1e-6)
        distance = np.abs(moved - y).mean()
        assert distance < 0.4 if far == 0.3 else distance > 0.5


@pytest.mark.long
def test_moved_universes_and_several_networks_learn_the_curve_better() -> None:
    data = curved()
    train, test = data.split["train"][:60], data.split["test"]
    data = replace(data, split={**data.split, "train": train})
    errors = []
    for how in (FEW, replace(FEW, members=4, plain=2, moved=0.5, degree=2)):
        net = fitted(data, 2, how)
        errors.append(((said(net, data).numpy() - data.targets)[test] ** 2).mean())
    assert errors[1] < errors[0]


@pytest.mark.long
def test_a_gaussian_head_says_how_far_it_is_off() -> None:
    data = curved()
    net = fitted(data, 5, replace(FEW, gaussian=True))
    mean, covariance = gaussian_moments(said(net, data)[data.split["test"]].double())
    off = torch.from_numpy(data.targets[data.split["test"]]) - mean
    squares = (off**2 / covariance.diagonal(dim1=1, dim2=2)).mean(0)
    assert torch.all((squares > 0.5) & (squares < 2)), squares


@pytest.mark.long
def test_the_command_goes_on_and_its_network_is_the_shipped_one(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Errors of the whole network on the volumes, read anew, are those that are recorded."""
    monkeypatch.setattr(head, "PIECE", 15)
    monkeypatch.setattr(head, "AS_SHIPPED", replace(FEW, steps=80, degree=2))
    monkeypatch.setattr(head, "LEVERS", {"random": Training(steps=40, line=False)})
    assert recipe.data.path is not None
    kept, run = tmp_path / "kept", tmp_path / "run"
    arguments = [str(recipe.data.path / "recipe.yaml"), "--kept", str(kept), "--sizes", "12"]
    arguments += ["--seeds", "3", "--levers", "--coverage", "--json", str(tmp_path / "head.json")]
    arguments += ["--run", str(run)]
    monkeypatch.setattr(sys, "argv", ["head.py", *arguments, "--dry-run"])
    head.main()
    assert not [*kept.parent.glob("*")]  # nothing was made
    plan = {line[:44].strip(): line[44:].split() for line in capsys.readouterr().out.splitlines()}
    missing = {kind: int(row[1]) for kind, row in plan.items() if kind not in ("pieces", "all")}
    asked = {"statistics, network": 3, "statistics, ridge": 3, "ridges": 4, "lines": 2, "heads": 4}
    assert missing == asked
    monkeypatch.setattr(sys, "argv", ["head.py", *arguments])
    head.main()
    record = json.loads((tmp_path / "head.json").read_text())
    assert [row["universes"] for row in record["rows"]] == [12, 24]
    assert set(record["rows"][0]["test"]) == {
        "network over mean",
        "ridge over mean",
        "network over ridge",
        "network over best ridge",
    }
    budget = record["budget"]
    assert {kind: row["timed"] for kind, row in budget.items()} == asked
    assert all(row["expected_s"] > 0 < row["taken_s"] for row in budget.values())
    assert not any(row["unforeseen"] for row in budget.values())
    assert "expected" in capsys.readouterr().out
    found = evaluate(run, checkpoint="head")
    for name, errors in found.errors.items():
        recorded = record["rows"][-1]["test"]["network over mean"][name]["value"]
        assert errors["ratio"] == pytest.approx(recorded, rel=1e-4)
    assert 0 <= record["coverage"]["network"]["parameters"]["number"]["coverage_68"] <= 1

    for path in list(kept.glob("head-*.npz")):
        path.unlink()
    head.main()
    again = json.loads((tmp_path / "head.json").read_text())
    assert (again["rows"], again["levers"]) == (record["rows"], record["levers"])
    budget = again["budget"]

    def none(*_: object) -> None:
        raise AssertionError("it was there")

    monkeypatch.setattr(head, "summary_statistics", none)
    monkeypatch.setattr(head, "train_head", none)
    monkeypatch.setattr(head, "fit_ridge", none)
    monkeypatch.setattr(head, "LinearLayer", none)
    head.main()
    again = json.loads((tmp_path / "head.json").read_text())
    assert again["rows"] == record["rows"]
    assert again["budget"] == budget  # what it took is kept with the pieces
    (kept / "ridge-00015.npz").write_bytes((kept / "ridge-00000.npz").read_bytes())
    with pytest.raises(hs.DataError, match=r"ridge-00015.npz the statistics of other"):
        head.main()
    with pytest.raises(hs.DataError, match=r"head\.py trains model"):
        head.network(
            load_recipe(tmp_path / "run" / "recipe.yaml", ["model.channels=[3]"]), (2, 4, 4, 4), 2
        )
