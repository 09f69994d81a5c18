"""Masks that all ranks write: their formats, what a rank holds, and going on after a stop (tiers:
one process; a few gloo ranks; child processes)."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from typer.testing import CliRunner

import hyperslab as hs
import hyperslab.train.predict as predicting
from hyperslab.cli import app
from hyperslab.errors import DataError
from hyperslab.formats.files import lock_folder
from hyperslab.formats.nifti import resample
from hyperslab.geometry import Box
from hyperslab.train import mask_files
from hyperslab.train.input_files import MASK_SUFFIXES
from hyperslab.train.mask_files import MaskBytes, MaskFormat, strips
from hyperslab.train.predict import predict
from hyperslab.train.samples import WindowPolicy
from tests.cli.test_interrupts import begin, nobody_left, wait
from tests.formats.convert.scans import nib, numbers, write
from tests.ranks import run_ranks
from tests.selection import in_gate
from tests.train.predict.runs import CLASSES, write_segmentation

XYZ = (21, 18, 25)
POLICY = WindowPolicy((8, 12, 16), 0.5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_segmentation(tmp_path_factory.mktemp("masks") / "run")


def predicted(
    run: Path, path: Path, out: Path, format: MaskFormat, windows: WindowPolicy | None, *grid: str
) -> list[str]:
    native = windows is not None
    outcomes = predict(
        run, [path], out, native=native, windows=windows, format=format, overrides=grid
    )
    return [outcome.state + outcome.reason for outcome in outcomes]


def canonical(path: Path) -> NDArray[np.uint8]:
    mask = nib.as_closest_canonical(nib.load(path))
    return np.asarray(mask.dataobj).transpose(2, 1, 0)


WAYS = [(ranks, windows) for ranks in (1, 2, 3) for windows in (None, POLICY)]


@pytest.mark.parametrize(("ranks", "windows"), in_gate(WAYS, kept=[(2, None)]))
def test_every_format_holds_the_same_mask(
    run: Path, tmp_path: Path, ranks: int, windows: WindowPolicy | None
) -> None:
    """Of a packed scan stored backwards, which whole is resampled to the network's lattice."""
    path = write(tmp_path / "a.nii.gz", numbers(XYZ), "LPS")
    out = tmp_path / "out"
    grid = () if ranks == 1 else (f"grid.height={ranks}",)
    assert predicted(run, path, tmp_path / "serial", "nifti", windows) == ["predicted"]
    expected = canonical(tmp_path / "serial/a-mask.nii.gz")
    assert len(np.unique(expected)) > 1
    for format in ("nifti", "hdf5", "zarr"):
        found = run_ranks(ranks, predicted, run, path, out / format, format, windows, *grid)
        assert found == [["predicted"]] * ranks
        assert len(list((out / format).iterdir())) == 2, "and the journal"
    masks = [canonical(out / "nifti/a-mask.nii.gz")]
    scan = nib.load(path)
    np.testing.assert_array_equal(nib.load(out / "nifti/a-mask.nii.gz").affine, scan.affine)
    affine = nib.as_closest_canonical(scan).affine[:, [2, 1, 0, 3]]
    with h5py.File(out / "hdf5/a-mask.hdf5") as file:
        masks.append(file["segmentation"][:])
        np.testing.assert_allclose(file.attrs["affine"], affine, atol=1e-4)
        assert [bytes(name) for name in file.attrs["classes"]] == [c.encode() for c in CLASSES]
    group = zarr.open_group(out / "zarr/a-mask.zarr", mode="r")
    masks.append(group["0"][:])
    np.testing.assert_allclose(group.attrs["affine"], affine, atol=1e-4)
    for mask in masks:
        assert mask.shape == expected.shape
        assert (mask != expected).mean() < 1e-3, "but where two classes are as likely"
        np.testing.assert_array_equal(mask, masks[0])


def labels(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 3, shape).astype(np.uint8)


def pyramid(folder: Path, shape: tuple[int, ...]) -> None:
    grid = hs.Grid(depth=3)
    mask = MaskBytes(folder / "bytes", shape)
    whole = labels(shape)
    if box := strips(shape, grid.size).get(grid.rank):
        mask.write(box, whole[box.slices()])
    affine = np.diag([0.5, 2.0, 3.0, 1.0])
    found = mask_files.FinishedMask(mask, shape, CLASSES, affine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_files, "SIDE", 5)
        mask_files.publish(found, folder / "m-mask.zarr", "zarr", grid, lambda read, path: None)


@pytest.mark.parametrize("kept", [-1, 12, 10**30])
def test_more_layers_than_there_are_were_never_written(tmp_path: Path, kept: int) -> None:
    shape = (11, 7, 13)
    for layers, expected in ((0, 0), (11, 11), (kept, 0)):
        mask = MaskBytes(tmp_path / "bytes", shape, layers)
        mask.close()
        assert mask.kept == expected


def test_levels_of_an_ome_zarr(tmp_path: Path) -> None:
    shape = (11, 7, 13)
    run_ranks(3, pyramid, tmp_path, shape)
    group = zarr.open_group(tmp_path / "m-mask.zarr", mode="r")
    image = group.attrs["ome"]["multiscales"][0]
    scales = [d["coordinateTransformations"][0]["scale"] for d in image["datasets"]]
    assert [d["path"] for d in image["datasets"]] == ["0", "1", "2"]
    assert scales == [[0.5, 2, 3], [1, 4, 6], [2, 8, 12]]
    assert [axis["name"] for axis in image["axes"]] == ["z", "y", "x"]
    expected = labels(shape)
    for level in "012":
        np.testing.assert_array_equal(group[level][:], expected)
        assert group[level].metadata.dimension_names == ("z", "y", "x")
        expected = expected[::2, ::2, ::2]


def stopped_after(parts: int, original: Any) -> Any:
    """A prediction that is killed after so many bands of layers."""

    def predict_mask(*arguments: Any) -> Iterator[tuple[Box, Any]]:
        for number, part in enumerate(original(*arguments)):
            if number == parts:
                raise KeyboardInterrupt
            yield part

    return predict_mask


def stop_predicting(run: Path, path: Path, out: Path, after: int) -> None:
    """Predicts until so many bands of layers are done, where the command is killed."""
    killed = stopped_after(after, predicting.predict_mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predicting, "predict_mask", killed)
        with pytest.raises(KeyboardInterrupt):
            predict(run, [path], out, native=True, windows=POLICY)


def test_a_stopped_mask_goes_on(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.nii.gz", numbers(XYZ))
    out = tmp_path / "out"
    stop_predicting(run, path, out, after=3)
    rows = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert [row["layers"] for row in rows[1:]] == [4, 8, 12]
    under_way = out / ".a-mask.bytes.partial"
    assert under_way.stat().st_size == np.prod(XYZ)
    firsts: list[int] = []
    original = predicting.predict_mask

    def noted(*arguments: Any) -> Any:
        firsts.append(arguments[-1])
        return original(*arguments)

    monkeypatch.setattr(predicting, "predict_mask", noted)
    (outcome,) = predict(run, [path], out, native=True, windows=POLICY)
    assert outcome.state == "predicted"
    assert firsts == [12]
    assert not under_way.exists()
    predict(run, [path], tmp_path / "unbroken", native=True, windows=POLICY)
    for folder in (out, tmp_path / "unbroken"):
        assert {entry.name for entry in folder.iterdir()} == {"a-mask.nii.gz", "predictions.jsonl"}
    assert (out / "a-mask.nii.gz").read_bytes() == (
        tmp_path / "unbroken/a-mask.nii.gz"
    ).read_bytes()
    assert firsts == [12, 0]
    (outcome,) = predict(run, [path], out, native=True, windows=POLICY)
    assert outcome.state == "kept"


@pytest.mark.long
def test_a_killed_command_goes_on(run: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii.gz", numbers((70, 66, 72)))
    masks = []
    for out, killed in ((tmp_path / "killed", True), (tmp_path / "unbroken", False)):
        words = ["predict", run, path, "--out", out, "--native", "--window", "16,12,16"]
        words += ["--ranks", "2", "grid.depth=2"]
        layers = partial(layers_of, out / "predictions.jsonl")
        if killed:
            process = begin(*words)
            wait(process, lambda layers=layers: len(layers()) >= 2)
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            nobody_left(process.pid)
            before = layers()
            assert not (out / "a-mask.nii.gz").exists()
        process = begin(*words)
        said = process.communicate()
        assert process.returncode == 0, said
        if killed:
            done = layers()
            assert done[0] == before[-1], "the journal keeps where it was"
            assert done == sorted(set(done)), "layers were predicted twice"
            assert len(done) > 1
        masks.append((out / "a-mask.nii.gz").read_bytes())
    assert masks[0] == masks[1]


def layers_of(journal: Path) -> list[int]:
    """How far a mask was, each time that it was noted."""
    if not journal.exists():
        return []
    whole, _, _ = journal.read_text().rpartition("\n")
    rows = [json.loads(line) for line in whole.splitlines()]
    return [row["layers"] for row in rows if "layers" in row]


def test_a_file_that_was_changed_begins_anew(run: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii", numbers(XYZ))
    out = tmp_path / "out"
    stop_predicting(run, path, out, after=3)
    write(path, numbers(XYZ, seed=1))
    predict(run, [path], out, native=True, windows=POLICY)
    predict(run, [path], tmp_path / "anew", native=True, windows=POLICY)
    masks = [canonical(folder / "a-mask.nii.gz") for folder in (out, tmp_path / "anew")]
    np.testing.assert_array_equal(*masks)


def test_a_stop_after_the_bytes_have_gone_leaves_no_zeros(run: Path, tmp_path: Path) -> None:
    """A full disk takes the bytes of a mask; the next start is stopped before its first layers."""
    path = write(tmp_path / "a.nii", numbers(XYZ))
    out = tmp_path / "out"
    stop_predicting(run, path, out, after=3)
    (out / ".a-mask.bytes.partial").unlink()
    stop_predicting(run, path, out, after=0)
    assert (out / ".a-mask.bytes.partial").exists()
    predict(run, [path], out, native=True, windows=POLICY)
    predict(run, [path], tmp_path / "unbroken", native=True, windows=POLICY)
    masks = [canonical(folder / "a-mask.nii.gz") for folder in (out, tmp_path / "unbroken")]
    assert masks[1].any()
    np.testing.assert_array_equal(*masks)


def changed_after_a_part(path: Path, original: Any) -> Any:
    """A prediction during which somebody writes the file anew."""

    def predict_mask(*arguments: Any) -> Iterator[tuple[Box, Any]]:
        for number, part in enumerate(original(*arguments)):
            yield part
            if number == 0:
                write(path, numbers(XYZ, seed=1))

    return predict_mask


def test_a_scan_that_changes_meanwhile_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a part of its mask would be of the one and a part of the other."""
    path = write(tmp_path / "a.nii", numbers(XYZ))
    changing = changed_after_a_part(path, predicting.predict_mask)
    monkeypatch.setattr(predicting, "predict_mask", changing)
    (outcome,) = predict(run, [path], tmp_path / "out", native=True, windows=POLICY)
    assert outcome.state == "failed"
    assert "a.nii: sample 'a.nii' has changed since" in outcome.reason
    assert not [*(tmp_path / "out").glob("*mask*")]


def test_a_scan_that_changes_after_it_was_read_is_not_done(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.nii", numbers(XYZ))
    original = predicting.predict_mask
    monkeypatch.setattr(predicting, "predict_mask", changed_after_a_part(path, original))
    predict(run, [path], tmp_path / "out", native=True)
    monkeypatch.setattr(predicting, "predict_mask", original)
    (outcome,) = predict(run, [path], tmp_path / "out", native=True)
    assert outcome.state == "predicted"


@pytest.mark.parametrize("format", ["nifti", "hdf5", "zarr"])
def test_nothing_is_left_of_a_mask_for_which_the_disk_is_too_small(
    run: Path, tmp_path: Path, format: MaskFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.nii", numbers(XYZ))

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mask_files.FinishedMask, "read", no_room)
    (outcome,) = predict(run, [path], tmp_path / "out", native=True, format=format)
    assert outcome.state == "failed"
    assert "No space left on device" in outcome.reason
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["predictions.jsonl"]


@pytest.mark.parametrize("format", ["nifti", "hdf5", "zarr"])
def test_a_start_removes_what_a_killed_one_was_writing(
    run: Path, tmp_path: Path, format: MaskFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.nii", numbers(XYZ))
    out = tmp_path / "out"
    with monkeypatch.context() as patch:  # as after SIGKILL, nobody tidies up
        patch.setattr(mask_files, "remove_scratch", lambda folder: None)
        patch.setattr("hyperslab.util.atomic_files.Path.unlink", lambda *_, **__: None)
        patch.setattr(mask_files, "nearest_box", stopped)
        with pytest.raises(KeyboardInterrupt):
            predict(run, [path], out, native=True, format=format)
    assert [*out.glob(f".a{MASK_SUFFIXES[format]}.partial*")]
    (outcome,) = predict(run, [path], out, native=True, format=format)
    assert outcome.state == "predicted"
    left = sorted(entry.name for entry in out.iterdir())
    assert left == [f"a{MASK_SUFFIXES[format]}", "predictions.jsonl"]


def stopped(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("format", ["nifti", "hdf5", "zarr"])
def test_a_folder_in_the_place_of_a_mask_stays(
    run: Path, tmp_path: Path, format: MaskFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.nii", numbers(XYZ))
    theirs = tmp_path / "out" / f"a{MASK_SUFFIXES[format]}"
    theirs.mkdir(parents=True)
    (theirs / "precious").touch()
    monkeypatch.setattr(predicting, "predict_mask", stopped)  # it is said before
    (outcome,) = predict(run, [path], tmp_path / "out", native=True, format=format)
    assert (outcome.state, (theirs / "precious").exists()) == ("failed", True)
    assert f"{theirs} is a folder with other things" in outcome.reason


def test_two_predictions_into_one_folder(run: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii", numbers(XYZ))
    out = tmp_path / "out"
    with lock_folder(out, "prediction"):
        with pytest.raises(DataError, match="another prediction into"):
            predict(run, [path], out, native=True)
        words = ["predict", str(run), str(path), "--out", str(out), "--ranks", "2", "grid.depth=2"]
        done = CliRunner().invoke(app, words)
        assert isinstance(done.exception, DataError), done.output
    assert not [*out.iterdir()], "logs of the other"
    (outcome,) = predict(run, [path], out, native=True)
    assert outcome.state == "predicted"


def test_a_file_that_is_read_otherwise_is_predicted_anew(run: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii", numbers(XYZ))
    out = tmp_path / "out"
    states = []
    for words in ([], ["data.multiple=16"], ["data.multiple=16"], []):
        (outcome,) = predict(run, [path], out, native=True, overrides=words)
        states.append(outcome.state)
    assert states == ["predicted", "predicted", "kept", "predicted"]


def test_a_format_that_is_none_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="format 'tiff': a mask is written as nifti, hdf5, zarr"):
        predict(run, [tmp_path], tmp_path / "out", format="tiff")  # type: ignore[arg-type]


extent = st.integers(1, 9)


def a_box(data: st.DataObject, shape: tuple[int, ...]) -> Box:
    """A box that is not empty."""
    lows = [data.draw(st.integers(0, n - 1)) for n in shape]
    return Box.of(
        [(lo, data.draw(st.integers(lo + 1, n))) for lo, n in zip(lows, shape, strict=True)]
    )


@given(st.tuples(extent, extent, extent), st.integers(1, 12))
def test_strips_divide_a_volume(extents: tuple[int, int, int], ranks: int) -> None:
    seen = np.zeros(extents, int)
    for rank, box in strips(extents, ranks).items():
        assert rank < ranks
        seen[box.slices()] += 1
    assert (seen == 1).all()


@given(st.data())
def test_boxes_that_are_written_are_read_again(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = data.draw(st.tuples(extent, extent, extent))
    mask = MaskBytes(tmp_path_factory.mktemp("bytes") / "m", shape)
    expected = np.zeros(shape, np.uint8)
    for value in range(1, 4):
        corners = [
            sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape
        ]
        box = Box.of([(lo, hi) for lo, hi in corners])
        values = np.full(box.shape, value, np.uint8)
        mask.write(box, values)
        expected[box.slices()] = value
    np.testing.assert_array_equal(mask.read(Box.whole(shape)), expected)
    mask.close()


@given(st.data())
def test_boxes_are_resampled_as_the_whole(data: st.DataObject) -> None:
    old = data.draw(st.tuples(extent, extent, extent))
    new = data.draw(st.tuples(*[st.integers(1, 14)] * 3))
    corners = [
        sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))
        for n in new
    ]
    box = Box.of([(lo, hi) for lo, hi in corners])
    values = np.random.default_rng(0).normal(size=old).astype(np.float32)

    def read(inside: Box) -> NDArray[Any]:
        return values[inside.slices()]

    found = resample.nearest_box(read, old, box, new)
    np.testing.assert_array_equal(found, resample.nearest(values, new)[box.slices()])
    if old != new:
        smooth = resample.blurred_linear_box(read, old, box, new)
        expected = resample.blurred_linear(values, new)[box.slices()]
        np.testing.assert_allclose(smooth, expected, atol=1e-5)
