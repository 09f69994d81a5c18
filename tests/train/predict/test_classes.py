"""Masks of scans (tiers: one process; a few gloo ranks)."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import hyperslab as hs
from hyperslab.errors import DataError
from hyperslab.formats.nifti import image
from hyperslab.formats.nifti.resample import blurred_linear, nearest
from hyperslab.recipe.load import recipe_for
from hyperslab.recipe.schema import Recipe
from hyperslab.train.evaluate import find_checkpoint
from hyperslab.train.predict import InputOutcome, TrainedNetwork, predict
from tests.formats.convert.scans import nib, numbers, write
from tests.ranks import run_ranks
from tests.train.predict.runs import LATTICE, WINDOW, unet, write_segmentation

XYZ = (14, 11, 9)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_segmentation(tmp_path_factory.mktemp("segmentation") / "run")


def by_hand(values: NDArray[np.int16]) -> NDArray[np.uint8]:
    """The classes of a volume (D, H, W), in plain torch."""
    x = torch.from_numpy(values.astype(np.float32))[None, None]
    low, high = WINDOW
    with torch.no_grad():
        logits = unet()((x.clamp(low, high) - low) / (high - low))
    return logits[0].argmax(0).numpy().astype(np.uint8)


def states(outcomes: list[InputOutcome]) -> dict[str, str]:
    return {outcome.input.name: outcome.state for outcome in outcomes}


@pytest.mark.parametrize(
    ("name", "orientation"), [("a.nii", "LPS"), ("b.nii.gz", "SAR"), ("c.nii", "RAS")]
)
def test_a_mask_lies_where_the_scan_does(
    run: Path, tmp_path: Path, name: str, orientation: str
) -> None:
    path = write(tmp_path / name, numbers(XYZ), orientation)
    (outcome,) = predict(run, [path], tmp_path / "out")
    assert outcome.state == "predicted"
    mask, scan = nib.load(tmp_path / "out" / f"{name[0]}-mask.nii.gz"), nib.load(path)
    np.testing.assert_array_equal(mask.affine, scan.affine)
    assert mask.shape == scan.shape
    assert mask.get_data_dtype() == np.uint8
    assert nib.aff2axcodes(mask.affine) == tuple(orientation)
    canonical = nib.as_closest_canonical(mask)
    values = np.rint(blurred_linear(numbers(XYZ).transpose(2, 1, 0), LATTICE)).astype(np.int16)
    expected = nearest(by_hand(values), XYZ[::-1])
    assert len(np.unique(expected)) > 1
    np.testing.assert_array_equal(np.asarray(canonical.dataobj).transpose(2, 1, 0), expected)


def test_at_the_files_own_resolution(run: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii", numbers(XYZ))
    predict(run, [path], tmp_path / "out", native=True)
    mask = np.asarray(nib.load(tmp_path / "out" / "a-mask.nii.gz").dataobj)
    np.testing.assert_array_equal(mask.transpose(2, 1, 0), by_hand(numbers(XYZ).transpose(2, 1, 0)))


def converted(path: Path, shape: tuple[int, ...], affine: bool = True) -> NDArray[np.int16]:
    values = numbers(shape)
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        file["volume"] = values[None]
        if affine:
            file.attrs["affine"] = np.diag([2.0, 3.0, 4.0, 1.0])[:, [2, 1, 0, 3]]
    return values


def test_hdf5_in_nifti_out(run: Path, tmp_path: Path) -> None:
    values = converted(tmp_path / "a.hdf5", LATTICE)
    converted(tmp_path / "lbann.h5", LATTICE, affine=False)
    outcomes = predict(run, [tmp_path / "a.hdf5", tmp_path / "lbann.h5"], tmp_path / "out")
    assert states(outcomes) == {"a": "predicted", "lbann": "predicted"}
    mask = nib.load(tmp_path / "out" / "a-mask.nii.gz")
    np.testing.assert_array_equal(np.asarray(mask.dataobj).transpose(2, 1, 0), by_hand(values))
    np.testing.assert_allclose(mask.affine, np.diag([2.0, 3.0, 4.0, 1.0]))
    unknown = nib.load(tmp_path / "out" / "lbann-mask.nii.gz").header
    assert (unknown["sform_code"], unknown["qform_code"]) == (0, 0), "it says that it does not know"


def bad_inputs(folder: Path) -> dict[str, str]:
    """Files that cannot be predicted, and what has to be said of each."""
    good = write(folder / "whole.nii.gz", numbers(XYZ))
    (folder / "cut.nii.gz").write_bytes(good.read_bytes()[:1000])
    (folder / "short.nii").write_bytes(gzip.decompress(good.read_bytes())[:500])
    (folder / "text.nii").write_text("no scan")
    write(folder / "4d.nii", np.stack([numbers(XYZ)] * 2, -1))
    write(folder / "flat.nii", np.zeros(XYZ, np.int16))
    converted(folder / "small.hdf5", (9, 13, 12))
    (folder / "foreign.h5").write_bytes(b"x" * 100)
    with h5py.File(folder / "empty.hdf5", "w") as file:
        file["other"] = 1
    (folder / "scan.mha").write_text("x")
    return {
        "cut.nii.gz": "truncated or of another format",
        "short.nii": "truncated or of another format",
        "text.nii": "truncated or of another format",
        "4d.nii": "is 4-D",
        "flat.nii": "is empty: every voxel is 0",
        "small.hdf5": "has 9 x 13 x 12 voxels but the network was trained on 10 x 13 x 12\n"
        "    --native predicts it as it is",
        "foreign.h5": "cannot be read as HDF5",
        "empty.hdf5": "none of the data sets full, x, volume",
        "scan.mha": r"takes \.nii, \.nii\.gz, \.hdf5, \.h5",
        "missing.nii": "missing.nii",
    }


def everything(run: Path, paths: list[Path], out: Path, *grid: str) -> list[InputOutcome]:
    return predict(run, paths, out, overrides=grid)


@pytest.mark.parametrize("grid", [(), ("grid.depth=2",)], ids=str)
def test_bad_inputs_are_named_and_the_others_predicted(
    run: Path, tmp_path: Path, grid: tuple[str, ...]
) -> None:
    expected = bad_inputs(tmp_path)
    paths = [*(tmp_path / name for name in expected), tmp_path / "whole.nii.gz"]
    outcomes = run_ranks(1 + len(grid), everything, run, paths, tmp_path / "out", *grid)
    assert all(states(found) == states(outcomes[0]) for found in outcomes)
    for outcome, words in zip(outcomes[0], expected.values(), strict=False):
        assert outcome.state == "failed", outcome
        with pytest.raises(DataError, match=f"(?s){outcome.input.path.name}.*{words}|{words}"):
            raise DataError(outcome.reason)
        assert outcome.input.path.name in outcome.reason
    assert outcomes[0][-1].state == "predicted"
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"whole-mask.nii.gz", "predictions.jsonl"}


def test_what_is_done_is_kept(run: Path, tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.nii", numbers(XYZ, seed=i)) for i, n in enumerate("ab")]
    out = tmp_path / "out"
    assert set(states(predict(run, paths[:1], out)).values()) == {"predicted"}
    assert states(predict(run, paths, out)) == {"a": "kept", "b": "predicted"}
    (out / "a-mask.nii.gz").unlink()
    write(paths[1], numbers((15, 11, 9)))
    assert states(predict(run, paths, out)) == {"a": "predicted", "b": "predicted"}
    assert nib.load(out / "b-mask.nii.gz").shape == (15, 11, 9)
    other = write_segmentation(tmp_path / "other", seed=1)
    assert states(predict(other, paths, out)) == {"a": "predicted", "b": "predicted"}
    assert set(states(predict(other, paths, out, native=True)).values()) == {"predicted"}


def on_grid(run: Path, path: Path, out: Path, *grid: str) -> NDArray[np.uint8] | None:
    predict(run, [path], out, overrides=grid)
    return None


@pytest.mark.parametrize(
    "grid",
    [("grid.depth=2",), ("grid.depth=2", "grid.height=2"), ("grid.width=3",)],
    ids=str,
)
def test_the_same_mask_on_every_grid(run: Path, tmp_path: Path, grid: tuple[str, ...]) -> None:
    path = write(tmp_path / "a.nii", numbers(XYZ), "LPS")
    predict(run, [path], tmp_path / "serial")
    ranks = math.prod(int(axis.rpartition("=")[2]) for axis in grid)
    run_ranks(ranks, on_grid, run, path, tmp_path / "cut", *grid)
    masks = [
        np.asarray(nib.load(tmp_path / folder / "a-mask.nii.gz").dataobj)
        for folder in ("serial", "cut")
    ]
    assert (masks[0] != masks[1]).mean() < 2e-3, "but for voxels where two classes are as likely"


def logits_of(run: Path, path: Path, *grid: str) -> tuple[torch.Tensor, tuple[int, ...]]:
    recipe: Recipe = recipe_for(run, grid)
    network = TrainedNetwork.of(
        recipe, find_checkpoint(run, "best"), hs.Grid(**recipe.grid.model_dump())
    )
    values = image.open_nifti(path).read()
    block = values[None][
        network.grid.partition((1, *values.shape)).box(network.grid.coords).slices()
    ]
    logits = network(np.ascontiguousarray(block), values.shape, path.name)
    return logits.full(), tuple(logits.local.shape)


def test_a_volume_that_fits_neither_grid_nor_strides(tmp_path: Path) -> None:
    """41 x 64 x 47 voxels on 2 x 2 x 1 ranks, with the paper's three poolings."""
    run = write_segmentation(tmp_path / "run", levels=3)
    path = write(tmp_path / "a.nii", numbers((47, 64, 41)))
    grid = ("grid.depth=2", "grid.height=2")
    values = image.open_nifti(path).read()[0]
    low, high = WINDOW
    x = (torch.from_numpy(values).float().clamp(low, high) - low) / (high - low)
    with torch.no_grad():
        expected = unet(levels=3)(x[None, None])
    results = run_ranks(4, logits_of, run, path, *grid)
    for logits, held in results:
        assert torch.linalg.norm(logits - expected) <= 1e-5 * torch.linalg.norm(expected)
        assert held[2] <= 0.6 * 41, "and no rank held much more than its half"
        assert held[3:] == (32, 47)
