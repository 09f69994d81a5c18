"""CAMELS and Quijote as published train by a recipe alone (tiers: no process; a few gloo ranks)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hyperslab.errors import DataError, RecipeError
from hyperslab.recipe.load import load_recipe
from hyperslab.train.evaluate import evaluate
from tests.formats.arrays.published import camels, quijote
from tests.ranks import run_ranks
from tests.train.universes import losses, run

AS_SMALL = ["model.variant=lbann", "model.batch_norm=true", "device=cpu", "epochs=2"]


def recipe(folder: Path, **data: Any) -> Path:
    """The lines that a user writes, and no more."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"data": {"batch_size": 4, **data}}))
    return path


def train_on(path: Path, output: Path, *overrides: str) -> list[float]:
    run(path, *AS_SMALL, f"output={output}", "optimizer.eps=1e-3", *overrides)
    return losses(output)


@pytest.mark.parametrize("which", ["camels", "quijote"])
def test_a_recipe_alone_trains_and_evaluates(tmp_path: Path, which: str) -> None:
    if which == "camels":
        camels(tmp_path / "CMD")
        mine = recipe(tmp_path, path=str(tmp_path / "CMD"), transform="log1p_mean")
    else:
        quijote(tmp_path, width=32)
        mine = recipe(tmp_path, path=str(tmp_path / "latin_hypercube"))
    parts = ["data.subvolume=16"] if which == "quijote" else []
    assert np.isfinite(train_on(mine, tmp_path / "out", *parts)).all()
    evaluate(tmp_path / "out")
    head = (tmp_path / "out" / "evaluation" / "predictions.csv").read_text().splitlines()[0]
    assert "predicted_phys_Omega_m" in head
    assert "predicted_phys_sigma_8" in head


def on_rank(path: Path, output: Path) -> None:
    train_on(path, output, "grid.depth=2")


def test_cut_over_two_ranks_it_is_the_same_training(tmp_path: Path) -> None:
    camels(tmp_path / "CMD")
    mine = recipe(tmp_path, path=str(tmp_path / "CMD"), transform="log1p_mean")
    run_ranks(2, on_rank, mine, tmp_path / "cut")
    serial = train_on(mine, tmp_path / "serial")
    assert losses(tmp_path / "cut") == pytest.approx(serial, rel=1e-3)


def test_a_resume_notices_another_table(tmp_path: Path) -> None:
    quijote(tmp_path)
    folder = tmp_path / "latin_hypercube"
    mine = recipe(tmp_path, path=str(folder), files="*/df_m_128_z=0.npy", fold=0, folds=3)
    out = tmp_path / "out"
    train_on(mine, out)
    with pytest.raises(RecipeError, match=r"training split .*\n?.*data\.table, data\.ranges"):
        run(mine, *AS_SMALL, f"output={out}", "epochs=3", "data.ranges={h: [0, 1]}", resume=True)
    table = folder / "latin_hypercube_params.txt"
    head, *rows = table.read_text().splitlines(keepends=True)
    table.write_text(head + "".join(reversed(rows)))
    with pytest.raises(RecipeError, match=r"training split"):
        run(mine, *AS_SMALL, f"output={out}", "epochs=3", "optimizer.eps=1e-3", resume=True)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"table": "a", "keys": {"targets": "b"}}, "data.keys.targets and data.table are two"),
        ({"ranges": {"h": [1, 0]}}, "data.ranges.h=[1.0, 0.0]: give two numbers"),
        ({"format": "hdf5", "table": "a"}, "data.format=hdf5 has keys and targets of its own"),
        ({"keys": {"volumes": "b"}}, "unknown key 'data.keys.volumes'\n    nearest: 'data.keys.v"),
    ],
)
def test_keys_that_do_not_go_together(tmp_path: Path, data: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe(tmp_path, path="x", **data))
    assert words in str(caught.value)


def table_of(folder: Path, values: Any) -> str:
    """A file of noise for each row, and the table."""
    folder.mkdir()
    random = np.random.default_rng(1)
    for number in range(len(values)):
        np.save(folder / f"sim_{number:02}.npy", random.random((16, 16, 16), dtype=np.float32))
    np.savetxt(folder / "t.txt", values, header="mass spin")
    return str(folder)


def test_another_table_is_measured_by_the_ranges_of_the_training(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    wide = random.uniform([1, 10], [3, 50], (10, 2))
    narrow = random.uniform([1.9, 20], [2.1, 21], (6, 2))
    first = table_of(tmp_path / "first", wide)
    other = table_of(tmp_path / "other", narrow)
    mine = recipe(tmp_path, path=first, table="t.txt")
    train_on(mine, tmp_path / "out")
    moved = [f"data.path={other}"]
    found = evaluate(tmp_path / "out", split="all", overrides=moved).predictions  # type: ignore[union-attr]
    order = [int(name[-2:]) for name in found.samples]
    assert found.true_physical == pytest.approx(narrow[order])
    low, high = wide.min(0), wide.max(0)
    assert found.true == pytest.approx((narrow[order] - low) / (high - low) * 2 - 1, abs=1e-6)
    unit = (found.predicted + 1) / 2 * (high - low) + low
    assert found.predicted_physical == pytest.approx(unit)
    with pytest.raises(DataError, match=r"has the targets spin, mass but .* trained on mass, spin"):
        evaluate(tmp_path / "out", overrides=[*moved, "data.columns=[spin,mass]"])


def test_a_density_below_zero_is_no_number(tmp_path: Path) -> None:
    camels(tmp_path / "CMD")
    path = tmp_path / "CMD" / "Grids_Mcdm_IllustrisTNG_LH_128_z=0.0.npy"
    np.save(path, np.load(path) - 1e12)
    mine = recipe(tmp_path, path=str(path), transform="log1p_mean")
    with pytest.raises(DataError, match=r"row \d+: Box.* use it for densities"):
        train_on(mine, tmp_path / "out")
