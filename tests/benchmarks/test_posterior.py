"""Posteriors by a flow, where the right ones are known (tier: no process)."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zuko", reason="the extra 'posterior'")

import head
import posterior
from kept import Kept
from posterior import Fitting, Posterior, calibration

from tests.benchmarks.test_head import FEW, curved

BRIEF = Fitting(transforms=1, hidden=(16,), epochs=12, batch=64, rate=5e-3)


def drawn(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Summaries whose noise is so large that the walls of the box cut the posterior off."""
    random = np.random.default_rng(seed)
    y = random.uniform(-1, 1, (count, 2))
    return y * [1.0, 3.0] + random.normal(size=y.shape), y


def exact(summary: float, noise: float, y: float) -> float:
    """The rank of y in a normal distribution that is cut off at -1 and 1."""
    below, low, high = (math.erf((at - summary) / noise / math.sqrt(2)) for at in (y, -1.0, 1.0))
    return (below - low) / (high - low)


@pytest.mark.long
def test_a_flow_finds_a_posterior_that_a_box_cuts_off() -> None:
    train, validation = drawn(3000, 0), drawn(500, 1)
    found = Posterior(*train, (-1, 1))
    found.fit(train, validation, 0, BRIEF)
    summary = np.array([[0.0, 0.0], [1.5, 3.0], [-2.0, 1.0]])
    y = np.array([[0.3, -0.2], [0.6, 0.8], [-0.9, 0.5]])
    ranks, levels = found.ranks(summary, y, 0)
    for sample in range(3):
        expected = [
            exact(summary[sample, 0], 1.0, y[sample, 0]),
            exact(summary[sample, 1] / 3, 1 / 3, y[sample, 1]),
        ]
        np.testing.assert_allclose(ranks[sample], expected, atol=0.08)
    assert np.all((levels >= 0) & (levels <= 1))


@pytest.mark.long
def test_ranks_of_a_right_posterior_are_even_and_of_a_narrow_one_are_not() -> None:
    train, validation, test = drawn(3000, 0), drawn(500, 1), drawn(400, 2)
    found = Posterior(*train, (-1, 1))
    found.fit(train, validation, 0, BRIEF)
    facts = calibration(("a", "b"), *found.ranks(*test, 0))
    for one in (*facts["parameters"].values(), facts["joint"]):
        low, high = one["coverage_68_interval"]
        assert low - 0.02 < 0.68 < high + 0.02
        assert one["ks_probability"] > 0.01
    sure = (test[0] * [1.0, 2.0], test[1])  # as if the second one said twice as much
    facts = calibration(("a", "b"), *found.ranks(*sure, 0))
    assert facts["parameters"]["b"]["ks_probability"] < 0.01
    assert facts["parameters"]["a"]["ks_probability"] > 0.01


def test_samples_are_summarised_by_those_that_have_not_seen_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = curved(80)
    splits: list[Any] = []

    def constant(part: head.Universes, *_: object) -> np.ndarray:
        splits.append(part.split)
        return np.full((80, 2), float(len(splits)))

    monkeypatch.setattr(posterior, "outputs_of", constant)
    monkeypatch.setattr(
        posterior, "ridge_of", lambda part, *_: (constant(part), [("network", 0.1)])
    )
    recipe: Any = None  # what would read it is replaced
    found = posterior.summaries(data, recipe, 0, FEW, Kept(tmp_path))
    everything = data.split["train"]
    for name in ("network", "ridge"):
        for sample in everything:
            split = splits[int(found[name][sample, 0]) - 1]
            assert sample not in split["train"]
            assert len(split["train"]) == len(everything) * 9 / 10
        rest = np.setdiff1d(np.arange(80), everything)
        assert len(np.unique(found[name][rest])) == 1
        of_all = splits[int(found[name][rest[0], 0]) - 1]
        np.testing.assert_array_equal(of_all["train"], everything)


def test_targets_outside_of_the_box_are_refused() -> None:
    data = curved(40)
    wide = replace(data, targets=2 * data.targets)
    with pytest.raises(ValueError, match="box of -1 to 1"):
        posterior.posteriors(wide, {"ridge": wide.targets}, 0, BRIEF, Kept(Path()))


def test_the_command_records_network_and_ridge(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = curved(200)
    monkeypatch.setattr(posterior, "load_recipe", lambda *_: None)
    monkeypatch.setattr(posterior, "universes_of", lambda *_: data)
    monkeypatch.setattr(
        posterior, "outputs_of", lambda part, *_: part.targets + 0.1 * part.features[:, :2]
    )
    monkeypatch.setattr(posterior, "Fitting", lambda: replace(BRIEF, epochs=2))
    monkeypatch.setattr(posterior, "SAMPLES", 100)
    out = tmp_path / "posterior.json"
    arguments = ["recipe.yaml", "--kept", str(tmp_path), "--json", str(out), "--seeds", "3", "5"]
    monkeypatch.setattr(sys, "argv", ["posterior.py", *arguments, "--dry-run"])
    posterior.main()
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(sys, "argv", ["posterior.py", *arguments])
    posterior.main()
    record = json.loads(out.read_text())
    assert record["training"]["members"] == 4
    assert record["budget"]["flows"]["timed"] == 4
    assert [one["seed"] for one in record["seeds"]] == [3, 5]
    assert record["seeds"][0]["ridge"] != record["seeds"][1]["ridge"]
    for name in ("network", "ridge"):
        found = record["summaries"][name]["test"]
        assert found["volumes"] == 50
        assert set(found["drawn"]) == {"a", "b", "together"}
        assert 0 <= found["parameters"]["a"]["coverage_95"] <= 1
