"""Parameters of universes (tiers: one process; a few gloo ranks)."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hyperslab.checkpoint.save_load import save
from hyperslab.errors import CheckpointError, RecipeError
from hyperslab.models import CosmoFlow
from hyperslab.recipe.load import recipe_for
from hyperslab.train.predict import JOURNAL, InputOutcome, predict
from tests.ranks import run_ranks
from tests.train.predict.runs import NAMES, UNIVERSES, multiscale, write_regression, write_run

WIDTH = 16


def universe(path: Path, seed: int, width: int = WIDTH, *, last: bool = True) -> NDArray[np.int16]:
    """A file without targets; returns the counts (C, D, H, W)."""
    counts = np.random.default_rng(seed).poisson(1 + seed, (4, width, width, width))
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["full"] = np.moveaxis(counts.astype(np.int16), 0, -1) if last else counts.astype("i2")
    return counts.astype(np.int16)


def by_hand(counts: NDArray[np.int16]) -> NDArray[np.float64]:
    """The normalised parameters of one cube, in plain torch."""
    with torch.no_grad():
        x = torch.log1p(torch.from_numpy(counts.astype(np.float32)))[None]
        return multiscale()(x)[0].double().numpy()


def table(out: Path) -> list[dict[str, str]]:
    with (out / "parameters.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_regression(tmp_path_factory.mktemp("regression") / "run")


def on_ranks(run: Path, paths: list[Path], out: Path, *grid: str) -> list[InputOutcome]:
    return predict(run, paths, out, overrides=grid)


@pytest.mark.parametrize("grid", [(), ("grid.depth=2", "grid.width=2")], ids=str)
def test_a_row_for_every_universe(run: Path, tmp_path: Path, grid: tuple[str, ...]) -> None:
    counts = [
        universe(tmp_path / "in" / "a.hdf5", 1),
        universe(tmp_path / "in" / "x" / "b.h5", 2, last=False),
    ]
    out = tmp_path / "out"
    run_ranks(2 ** len(grid), on_ranks, run, [tmp_path / "in"], out, *grid)
    rows = table(out)
    assert [Path(row["file"]).name for row in rows] == ["a.hdf5", "b.h5"]
    for row, values in zip(rows, counts, strict=True):
        unit = by_hand(values)
        physical = UNIVERSES.parameters.physical(unit)
        for i, name in enumerate(NAMES):
            assert float(row[f"predicted_{name}"]) == pytest.approx(unit[i], abs=1e-5)
            assert float(row[f"predicted_phys_{name}"]) == pytest.approx(physical[i], rel=1e-5)


def test_bad_universes_are_named_and_the_others_are_in_the_table(run: Path, tmp_path: Path) -> None:
    universe(tmp_path / "good.hdf5", 1)
    universe(tmp_path / "small.hdf5", 1, width=8)
    with h5py.File(tmp_path / "negative.hdf5", "w") as file:
        file["full"] = np.full((WIDTH, WIDTH, WIDTH, 4), -1, np.int16)
    (tmp_path / "scan.nii").write_text("x")
    names = ("small.hdf5", "negative.hdf5", "scan.nii", "gone.hdf5", "good.hdf5")
    outcomes = predict(run, [tmp_path / name for name in names], tmp_path / "out")
    assert [outcome.state for outcome in outcomes] == ["failed"] * 4 + ["predicted"]
    for outcome, words in zip(
        outcomes, ("trained on", "negative counts", "takes .hdf5, .h5", "gone"), strict=False
    ):
        assert outcome.input.path.name in outcome.reason
        assert words in outcome.reason
    assert [row["sample"] for row in table(tmp_path / "out")] == ["good"]


def test_what_is_done_stays_in_the_table(run: Path, tmp_path: Path) -> None:
    for i, name in enumerate("ab"):
        universe(tmp_path / f"{name}.hdf5", i)
    out, paths = tmp_path / "out", [tmp_path / "a.hdf5", tmp_path / "b.hdf5"]
    predict(run, paths[:1], out)
    before = table(out)
    assert [o.state for o in predict(run, paths, out)] == ["kept", "predicted"]
    assert table(out)[0] == before[0]
    assert [row["sample"] for row in table(out)] == ["a", "b"]
    universe(tmp_path / "c.hdf5", 2)
    predict(run, [tmp_path / "c.hdf5"], out)
    assert [row["sample"] for row in table(out)] == ["a", "b", "c"], "of all commands"
    assert table(out)[0] == before[0]


def test_another_network_with_the_same_weights_predicts_anew(run: Path, tmp_path: Path) -> None:
    universe(tmp_path / "a.hdf5", 0)
    out, paths = tmp_path / "out", [tmp_path / "a.hdf5"]
    predict(run, paths, out)
    (again,) = predict(run, paths, out, overrides=["model.dropout=0.25"])
    assert again.state == "predicted"


@pytest.mark.parametrize(
    "odd",
    [
        *({"samples": found} for found in (5, {}, {"a": "x"}, {"a": [0.5]}, {"a": [None] * 4})),
        *({"samples": {"a": [0.5, 0.5, 0.5, True]}}, {"name": 7}, {"path": 7}, {"layers": "x"}),
    ],
    ids=str,
)
def test_a_row_of_the_journal_that_cannot_be_is_predicted_anew(
    run: Path, tmp_path: Path, odd: dict[str, object]
) -> None:
    universe(tmp_path / "a.hdf5", 1)
    out = tmp_path / "out"
    predict(run, [tmp_path / "a.hdf5"], out)
    before = table(out)
    head, row = (out / JOURNAL).read_text().splitlines()
    (out / JOURNAL).write_text(f"{head}\n{json.dumps(json.loads(row) | odd)}\n")
    assert [o.state for o in predict(run, [tmp_path / "a.hdf5"], out)] == ["predicted"]
    assert table(out) == before


def test_what_has_changed_and_fails_now_has_no_older_row(run: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "a.hdf5", tmp_path / "b.hdf5"]
    for seed, path in enumerate(paths):
        universe(path, seed)
    predict(run, paths, tmp_path / "out")
    paths[0].write_bytes(b"no universe any more")
    outcomes = predict(run, paths, tmp_path / "out")
    assert [outcome.state for outcome in outcomes] == ["failed", "kept"]
    assert [row["sample"] for row in table(tmp_path / "out")] == ["b"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"about": 5}, "does not say what its network was trained on: about: Input should be"),
        ({"about": {"shape": "x"}}, r"about\.shape: Input should be"),
        ({"ema": 5}, r"averages \(ema\) of .*step-00000007 are of another"),
        ({"ema": {"head.6.weight": "x"}}, r"\(ema\) of .*step-00000007 are of another"),
    ],
    ids=str,
)
def test_a_checkpoint_of_whole_files_that_say_nonsense_is_one_error(
    tmp_path: Path, extra: dict[str, object], words: str
) -> None:
    run = write_regression(tmp_path / "run")
    kept: dict[str, Any] = {"about": asdict(UNIVERSES), **extra}
    save((run / "checkpoints" / "best").resolve(), multiscale(), **kept)
    universe(tmp_path / "a.hdf5", 1)
    with pytest.raises(CheckpointError, match=words):
        predict(run, [tmp_path / "a.hdf5"], tmp_path / "out")


def test_a_checkpoint_of_other_volumes_than_the_network_takes_is_named(tmp_path: Path) -> None:
    network = CosmoFlow(16, variant="lbann")
    run = write_run(tmp_path / "run", network, UNIVERSES, model={"variant": "lbann"})
    checkpoint = (run / "checkpoints" / "best").resolve()
    about = {**asdict(UNIVERSES), "shape": (4, 16, 10**30, 16)}
    save(checkpoint, network, about=about)
    universe(tmp_path / "a.hdf5", 1)
    with pytest.raises(RecipeError, match=f"by {checkpoint} data.* holds volumes of"):
        predict(run, [tmp_path / "a.hdf5"], tmp_path / "out")


def test_the_cubes_of_a_universe_are_samples(tmp_path: Path) -> None:
    run = write_regression(tmp_path / "run", whole=32)
    counts = universe(tmp_path / "a.hdf5", 3, width=32)
    predict(run, [tmp_path / "a.hdf5"], tmp_path / "out")
    rows = table(tmp_path / "out")
    assert [row["sample"] for row in rows] == [
        f"a_{x}_{y}_{z}" for x in (0, 1) for y in (0, 1) for z in (0, 1)
    ]
    cube = by_hand(counts[:, 16:, :16, 16:])
    assert float(rows[5]["predicted_n_s"]) == pytest.approx(cube[2], abs=1e-5)


def test_the_grid_cuts_volumes(run: Path, tmp_path: Path) -> None:
    def axes(ranks: int, *overrides: str) -> dict[str, int]:
        recipe = recipe_for(run, overrides, ranks=ranks, axis="depth", replicas=False)
        grid = recipe.grid.model_dump()
        return {axis: n for axis, n in grid.items() if n > 1}

    assert axes(1) == {}
    assert axes(4) == {"depth": 4}
    assert axes(4, "grid.height=2", "grid.width=2") == {"height": 2, "width": 2}
    with pytest.raises(RecipeError, match=r"grid\.data=2: volumes are predicted one after the oth"):
        axes(2, "grid.data=2")
    trained = Path(shutil.copytree(run, tmp_path / "run", symlinks=True))
    recipe = (trained / "recipe.yaml").read_text()
    (trained / "recipe.yaml").write_text(recipe + "grid: {data: 2, depth: 2}\n")
    found = recipe_for(trained, [], ranks=4, axis="depth", replicas=False)
    assert found.grid.model_dump()["depth"] == 4


def test_samples_of_one_name_are_told_apart(run: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "in" / name / "u.hdf5" for name in ("a", "b")]
    for seed, path in enumerate(paths):
        universe(path, seed)
    predict(run, [tmp_path / "in"], tmp_path / "out")
    rows = table(tmp_path / "out")
    assert [row["sample"] for row in rows] == ["a/u:u", "b/u:u"]
    assert [row["file"] for row in rows] == ["../in/a/u.hdf5", "../in/b/u.hdf5"]
