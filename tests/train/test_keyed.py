"""Own files by keys, from a recipe to masks and numbers: labels beside volumes, fields as channels,
raw files that are predicted (tiers: no process; a few gloo ranks)."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import yaml

import hyperslab as hs
from hyperslab.errors import DataError, RecipeError
from hyperslab.formats import DataMap
from hyperslab.geometry import Box
from hyperslab.recipe.load import load_recipe
from hyperslab.train.evaluate import evaluate
from hyperslab.train.predict import predict
from tests.formats.arrays.published import WIDTH, camels, quijote
from tests.ranks import run_ranks
from tests.train.universes import losses, run

CLASSES = ["background", "organ"]
AS_SMALL = ["device=cpu", "epochs=2", "optimizer.eps=1e-3"]
NETWORK = ["model.variant=lbann", "model.batch_norm=true", *AS_SMALL]


def labelled(folder: Path, count: int = 8, *, labels: str = "masks/organ") -> Path:
    """A file for each scan, its labels beside it."""
    folder.mkdir()
    random = np.random.default_rng(2)
    for number in range(count):
        with h5py.File(folder / f"scan_{number}.h5", "w") as file:
            scan = random.normal(0, 1, (12, 10, 8)).astype(np.float32)
            file["images/ct"] = scan
            file[labels] = (scan > 0.5).astype(np.int64)
    return folder


def recipe(path: Path, data: dict[str, Any], **keys: Any) -> Path:
    values = {"data": {"batch_size": 2, **data}, "output": str(path.with_suffix("")), **keys}
    path.write_text(yaml.safe_dump(values))
    return path


def by_keys(folder: Path, **data: Any) -> Path:
    keys = {"volume": "images/ct", "labels": "masks/organ"}
    section = {"path": str(folder), "keys": keys, "classes": CLASSES, **data}
    unet = {"name": "unet3d", "channels": 2, "levels": 1}
    return recipe(folder.with_suffix(".yaml"), section, model=unet, loss="cross_entropy")


def test_labels_under_a_key_are_learnt_and_predicted(tmp_path: Path) -> None:
    mine = by_keys(labelled(tmp_path / "scans"))
    run(mine, *AS_SMALL)
    run_ranks(2, run, mine, *AS_SMALL, "grid.depth=2", f"output={tmp_path / 'cut'}")
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "scans"), rel=1e-4)
    found = evaluate(tmp_path / "scans")
    assert set(found.scores) == set(CLASSES)  # type: ignore[union-attr]
    raw = tmp_path / "raw.h5"
    with h5py.File(raw, "w") as file:
        file["images/ct"] = np.zeros((12, 10, 8), np.float32)
    assert predict(tmp_path / "scans", [raw], tmp_path / "out")[0].state == "predicted"
    assert (tmp_path / "out" / "raw-mask.nii.gz").exists()


def test_labels_are_those_of_their_box(tmp_path: Path) -> None:
    folder = labelled(tmp_path / "scans", 2)
    said = DataMap(volume="images/ct", labels="masks/organ", classes=("a", "b"))
    with hs.open(folder, hs.Grid(), batch_size=1, split="all", mapping=said) as data:
        with h5py.File(folder / "scan_1.h5") as file:
            expected = file["masks/organ"][2:5, 1:9, 3:4]
        assert (data.source.labels(1, Box((2, 1, 3), (5, 9, 4))) == expected).all()


def test_rows_of_volumes_with_rows_of_labels(tmp_path: Path) -> None:
    scans = np.random.default_rng(1).normal(0, 1, (6, 8, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "all.npz", x=scans, y=(scans > 0).astype(np.uint8))
    said = DataMap(volume="x", labels="y", classes=("a", "b"))
    with hs.open(tmp_path / "all.npz", hs.Grid(), batch_size=6, split="all", mapping=said) as data:
        x, y = next(data.epoch(0))
    assert tuple(y.shape) == (6, 8, 8, 8)
    assert ((x.full()[:, 0] > 0) == y.full()).all()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"classes": None}, r"labels and data\.classes go together.*\n.*coming-from/fourier\.md"),
        ({"table": "t.txt"}, r"labels and targets: a network learns one of the two"),
        ({"keys": {"volume": "images/ct", "labels": "masks/liver"}}, r"has no 'masks/liver'; it h"),
        (
            {"keys": {"volume": "images/ct", "labels": "images/ct"}},
            r"are .*whole numbers.*\n.*own loop",
        ),
        ({"classes": ["a", "b", "c"], "keys": {"labels": "masks/organ"}}, "which array is the vol"),
    ],
)
def test_what_is_wrong_with_labels_is_named(
    tmp_path: Path, data: dict[str, Any], words: str
) -> None:
    folder = labelled(tmp_path / "scans", 4)
    with pytest.raises((DataError, RecipeError), match=words):
        run(by_keys(folder, **data), *AS_SMALL)


def test_a_label_without_a_class_is_named(tmp_path: Path) -> None:
    folder = labelled(tmp_path / "scans")
    with h5py.File(folder / "scan_3.h5", "a") as file:
        file["masks/organ"][0, 0, 0] = 256  # which is 0 in 8 bits
    with pytest.raises(DataError, match=r"scan_3.*not classes, such as 256"):
        run(by_keys(folder), *AS_SMALL)


def test_fields_of_camels_are_channels(tmp_path: Path) -> None:
    grids = camels(tmp_path / "CMD", fields=("Mcdm", "T"))
    fields = ["Grids_Mcdm_*", "Grids_T_*"]
    section = {"path": str(tmp_path / "CMD"), "files": fields, "transform": "log1p_mean"}
    mine = recipe(tmp_path / "run.yaml", section)
    said = load_recipe(mine).data.mapping
    with hs.open(tmp_path / "CMD", hs.Grid(), batch_size=2, split="all", mapping=said) as data:
        assert data.shape == (2, 16, 16, 16)
        found = data.source.read(3, Box((0, 0, 0, 0), (2, 16, 4, 16)))
        assert (found == np.stack([grids[3], 2 * grids[3]])[:, :, :4]).all()
    run(mine, *NETWORK)
    run_ranks(2, run, mine, *NETWORK, "grid.depth=2", f"output={tmp_path / 'cut'}")
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "run"), rel=1e-3)
    evaluate(tmp_path / "run")
    one = tmp_path / "CMD" / "Grids_Mcdm_IllustrisTNG_LH_128_z=0.0.npy"
    outcome = predict(tmp_path / "run", [one], tmp_path / "out")[0]
    assert "takes 2 files as channels" in outcome.reason


def test_each_field_is_divided_by_its_own_mean(tmp_path: Path) -> None:
    camels(tmp_path, fields=("Mcdm", "T"))
    said = DataMap(fields=("Grids_Mcdm_*", "Grids_T_*"))
    options: dict[str, Any] = {"batch_size": 2, "mapping": said, "transform": "log1p_mean"}
    with hs.open(tmp_path, hs.Grid(), **options) as data:
        x, _ = next(data.epoch(0))
    assert x.full()[:, 0].numpy() == pytest.approx(x.full()[:, 1].numpy(), rel=1e-5)


def test_an_empty_voxel_has_a_density(tmp_path: Path) -> None:
    camels(tmp_path)
    path = tmp_path / "Grids_Mcdm_IllustrisTNG_LH_128_z=0.0.npy"
    grids = np.load(path) * (np.random.default_rng(1).uniform(size=WIDTH) > 0.5)
    np.save(path, grids)
    options: dict[str, Any] = {"batch_size": 12, "split": "all", "transform": "log1p_mean"}
    with hs.open(tmp_path, hs.Grid(), **options) as data:
        x, _ = next(data.epoch(0))
    means = grids.mean((1, 2, 3), keepdims=True)
    assert x.full()[:, 0].numpy() == pytest.approx(np.log1p(grids / means), rel=1e-5)


def test_fields_that_do_not_belong_together(tmp_path: Path) -> None:
    camels(tmp_path, fields=("Mcdm", "T"))
    path = tmp_path / "Grids_T_IllustrisTNG_LH_128_z=0.0.npy"
    np.save(path, np.load(path)[:, :8])
    said = DataMap(fields=("Grids_Mcdm_*", "Grids_T_*"))
    with pytest.raises(DataError, match=r"fields that become channels need as many volumes"):
        hs.open(tmp_path, hs.Grid(), batch_size=2, mapping=said)


def test_raw_files_are_predicted_without_their_table(tmp_path: Path) -> None:
    quijote(tmp_path)
    folder = tmp_path / "latin_hypercube"
    run(recipe(tmp_path / "run.yaml", {"path": str(folder)}), *NETWORK)
    raw = tmp_path / "raw.npy"
    raw.write_bytes((folder / "3" / "df_m_128_z=0.npy").read_bytes())
    many = tmp_path / "many.npy"
    np.save(many, np.stack([np.load(raw)] * 2))
    done = predict(tmp_path / "run", [raw, many], tmp_path / "out")
    assert [outcome.reason for outcome in done] == ["", ""]
    with (tmp_path / "out" / "parameters.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    found = evaluate(tmp_path / "run", split="all").predictions  # type: ignore[union-attr]
    here = found.predicted_physical[found.samples.index("3/df_m_128_z=0")]
    for row in rows:
        values = [float(row[f"predicted_phys_{name}"]) for name in found.names]
        assert values == pytest.approx(here, rel=1e-5)
