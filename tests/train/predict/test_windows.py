"""Sliding windows cut over ranks, against MONAI's in serial (tiers: one process; gloo ranks)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.inferers import sliding_window_inference
from numpy.typing import NDArray
from typer.testing import CliRunner

import hyperslab as hs
from hyperslab.cli import app
from hyperslab.errors import DataError
from hyperslab.formats.nifti import image
from hyperslab.models import UNet3D
from hyperslab.recipe.load import recipe_for
from hyperslab.train.evaluate import find_checkpoint
from hyperslab.train.input_volumes import NiftiVolume
from hyperslab.train.predict import TrainedNetwork, predict, predict_mask
from hyperslab.train.samples import WindowPolicy
from tests.formats.convert.scans import nib, numbers, write
from tests.ranks import run_ranks
from tests.selection import by_rotation
from tests.train.predict.runs import CLASSES, SCANS, WINDOW, unet, write_run, write_segmentation

pytestmark = pytest.mark.usefixtures("forked")

XYZ = (21, 18, 25)

POLICIES = {
    "gaussian": WindowPolicy((16, 12, 16), 0.5),
    "constant": WindowPolicy((12, 16, 12), 0.25, "constant"),
    "larger than the volume": WindowPolicy((32, 16, 24), 0.5),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_segmentation(tmp_path_factory.mktemp("windows") / "run")


def decoded(values: NDArray[Any]) -> torch.Tensor:
    low, high = WINDOW
    return (torch.from_numpy(values.astype(np.float32)).clamp(low, high) - low) / (high - low)


def by_monai(path: Path, policy: WindowPolicy) -> NDArray[np.uint8]:
    """(D, H, W), by MONAI alone."""
    x = decoded(image.open_nifti(path).read())[None]
    with torch.no_grad():
        scores = sliding_window_inference(
            x, policy.size, 1, unet(), overlap=policy.overlap, mode=policy.blend
        )
    return scores[0].argmax(0).numpy().astype(np.uint8)


def ours(run: Path, path: Path, policy: WindowPolicy, *grid: str) -> NDArray[np.uint8]:
    """The classes that this rank finds, 9 where it finds none."""
    recipe = recipe_for(run, grid)
    network = TrainedNetwork.of(
        recipe, find_checkpoint(run, "best"), hs.Grid(**recipe.grid.model_dump())
    )
    grid = network.grid
    scratch = path.parent
    volume = NiftiVolume([path], network.about, grid, scratch, native=True, fill=WINDOW[0])
    mask = np.full(volume.extents, 9, np.uint8)
    for box, classes in predict_mask(network, volume, policy, str(path)):
        mask[box.slices()] = classes
    return mask


@pytest.mark.parametrize("kind", POLICIES)
def test_as_monai_does_it_in_serial(run: Path, tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "a.nii", numbers(XYZ))
    expected = by_monai(path, POLICIES[kind])
    assert len(np.unique(expected)) > 1
    np.testing.assert_array_equal(ours(run, path, POLICIES[kind]), expected)


@pytest.mark.parametrize(
    ("kind", "grid"), by_rotation(POLICIES, [("grid.depth=2",), ("grid.depth=2", "grid.width=2")])
)
def test_windows_that_are_cut_over_ranks(
    run: Path, tmp_path: Path, kind: str, grid: tuple[str, ...]
) -> None:
    path = write(tmp_path / "a.nii", numbers(XYZ))
    found = run_ranks(2 ** len(grid), ours, run, path, POLICIES[kind], *grid)
    assert (sum((mask != 9).astype(int) for mask in found) == 1).all(), "each voxel has one owner"
    shares = [(mask != 9).mean() for mask in found]
    assert max(shares) <= 1.2 * min(shares)
    expected = by_monai(path, POLICIES[kind])
    joined = np.min(found, 0)
    assert (joined != expected).mean() < 1e-3, "but where two classes are as likely"


@pytest.mark.long
def test_the_command(run: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii.gz", numbers(XYZ), "LPS")
    options = ["--native", "--window", "16,12,16", "--overlap", "0.5", "--blend", "gaussian"]
    command = [sys.executable, "-m", "hyperslab", "predict", str(run), str(path)]
    subprocess.run([*command, "--out", str(tmp_path / "out"), *options], check=True)
    mask = nib.as_closest_canonical(nib.load(tmp_path / "out/a-mask.nii.gz"))
    expected = by_monai(path, POLICIES["gaussian"])
    np.testing.assert_array_equal(np.asarray(mask.dataobj).transpose(2, 1, 0), expected)
    other = predict(run, [path], tmp_path / "out", native=True)
    assert other[0].state == "predicted", "a prediction without windows is another one"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--window", "1,2"], "give one number or three"),
        (["--window", "8", "--overlap", "1"], "0 <= overlap < 1"),
        (["--window", "8", "--blend", "linear"], "gaussian"),
        (["--overlap", "0.5"], "give --window"),
    ],
)
def test_what_is_no_window_is_refused(run: Path, options: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["predict", str(run), "a.nii", "--out", "x", *options])
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())


def varied(folder: Path, *, channels: int = 1, multiple: int | None = None, **card: Any) -> Path:
    """A run whose volumes differed in shape, of float32 values."""
    torch.manual_seed(0)
    model = UNet3D(channels, len(CLASSES), channels=2, levels=2)
    model(torch.randn(2, channels, 16, 16, 16))
    shape = (channels, 24, 24, 24)
    about = replace(SCANS, shape=shape, whole=shape, dtype="float32", varied=True, **card)
    data = {"path": str(folder / "gone"), "batch_size": 1, "multiple": multiple}
    network = {"name": "unet3d", "channels": 2, "levels": 2}
    return write_run(folder, model.eval(), about, model=network, loss="dice", data=data)


def whole(run: Path, x: torch.Tensor) -> NDArray[np.uint8]:
    """By the plain network, padded to multiples of 4."""
    recipe = recipe_for(run, ())
    network = TrainedNetwork.of(recipe, find_checkpoint(run, "best"), hs.Grid())
    extents = x.shape[-3:]
    rims = [r for e in reversed(extents) for r in (0, -e % 4)]
    with torch.no_grad():
        scores = network.model(hs.shard(torch.nn.functional.pad(x, rims)[None], hs.Grid())).full()
    return scores[0].argmax(0)[tuple(map(slice, extents))].numpy().astype(np.uint8)


def masked(folder: Path, name: str) -> NDArray[Any]:
    mask = nib.as_closest_canonical(nib.load(folder / f"{name}-mask.nii.gz"))
    return np.asarray(mask.dataobj).transpose(2, 1, 0)


@pytest.mark.parametrize(
    ("xyz", "axes"), [((21, 18, 25), "RAS"), ((13, 17, 10), "RAS"), ((20, 16, 24), "LPI")]
)
def test_a_scan_of_any_shape_is_predicted_as_it_is(
    tmp_path: Path, xyz: tuple[int, ...], axes: str
) -> None:
    run = varied(tmp_path / "run", multiple=4)
    values = (numbers(xyz) / 1000).astype(np.float32)
    path = write(tmp_path / "a.nii", values, axes)
    (outcome,) = predict(run, [path], tmp_path / "out")
    assert outcome.state == "predicted", outcome
    expected = whole(run, torch.from_numpy(values.transpose(2, 1, 0).copy())[None])
    assert len(np.unique(expected)) > 1, "values were not rounded to whole numbers"
    np.testing.assert_array_equal(masked(tmp_path / "out", "a"), expected)


def test_channels_of_one_file_and_of_several(tmp_path: Path) -> None:
    run = varied(tmp_path / "run", channels=2, multiple=4)
    parts = [(numbers(XYZ, seed) / 1000).astype(np.float32) for seed in (0, 1)]
    folder = tmp_path / "scans"
    write(folder / "one.nii.gz", np.stack(parts, -1))
    for channel, part in enumerate(parts):
        write(folder / f"case_{channel:04}.nii.gz", part)
    outcomes = predict(run, [folder], tmp_path / "out")
    assert {o.input.name: o.state for o in outcomes} == {"case": "predicted", "one": "predicted"}
    x = torch.from_numpy(np.stack([part.transpose(2, 1, 0) for part in parts]))
    expected = whole(run, x)
    for name in ("case", "one"):
        np.testing.assert_array_equal(masked(tmp_path / "out", name), expected)
    (folder / "case_0001.nii.gz").unlink()
    (outcome,) = predict(run, [folder / "case_0000.nii.gz"], tmp_path / "out")
    assert outcome.state == "failed"
    assert "case_0001.nii.gz" in outcome.reason


def test_a_scan_is_brought_to_the_voxels_of_the_training(tmp_path: Path) -> None:
    run = varied(tmp_path / "run", multiple=4, voxel=(2.5, 1.6, 1.4))  # SPACING is 0.7, 0.8, 2.5
    path = write(tmp_path / "a.nii", numbers((24, 20, 9)))
    predict(run, [path], tmp_path / "out")
    assert masked(tmp_path / "out", "a").shape == (9, 20, 24)
    recipe = recipe_for(run, ())
    network = TrainedNetwork.of(recipe, find_checkpoint(run, "best"), hs.Grid())
    for native, shape in ((False, (1, 9, 10, 12)), (True, (1, 9, 20, 24))):
        found = NiftiVolume([path], network.about, network.grid, tmp_path, native=native)
        assert found.shape == shape


def test_values_of_another_unit_are_spoken_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as from 0 to 1, for a network of scans in HU: rounding would leave two values."""
    values = np.random.default_rng(0).random((10, 9, 8), np.float32)
    for scale, said in ((1, True), (1000, False)):
        path = write(tmp_path / f"{scale}.nii", values * np.float32(scale))
        NiftiVolume([path], SCANS, hs.Grid(), tmp_path, native=True)
        path = write(tmp_path / f"{scale}.nii", np.rint(values * np.float32(9)))
        NiftiVolume([path], SCANS, hs.Grid(), tmp_path, native=True)
        assert [f"{scale}.nii: its values, " in words for words in caplog.messages] == [True] * said
        caplog.clear()


def test_mean_scaling_goes_with_no_window(tmp_path: Path) -> None:
    data = {"path": str(tmp_path / "gone"), "batch_size": 1, "transform": "mean"}
    network = {"name": "unet3d", "channels": 2, "levels": 2}
    run = write_run(tmp_path / "run", unet(), SCANS, model=network, loss="dice", data=data)
    path = write(tmp_path / "a.nii", numbers(XYZ))
    with pytest.raises(DataError, match="mean of a whole volume"):
        predict(run, [path], tmp_path / "out", windows=WindowPolicy((8, 8, 8)))
