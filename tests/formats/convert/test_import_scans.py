"""From a folder of NIfTI files to one of HDF5 files (tier: no process group, some workers)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hyperslab import Grid, open
from hyperslab.data import os_bytes_read
from hyperslab.errors import DataError, HyperslabError
from hyperslab.formats.convert.scans import ScanOutcome, convert_scans
from hyperslab.formats.nifti import image as nifti
from hyperslab.formats.nifti import resample
from hyperslab.formats.nifti.source import find_pairs
from tests.forked import forked_commands
from tests.formats.convert.scans import affine_of, classes, nib, numbers, write
from tests.simulate.test_universe_file import full_disk

ROOT = Path(__file__).parents[3]
XYZ, SHAPE = (9, 8, 7), (6, 4, 5)


def pair(folder: Path, number: int, orientation: str = "LPS", suffix: str = ".nii") -> None:
    write(folder / f"volume-{number}{suffix}", numbers(XYZ, number), orientation)
    write(folder / f"segmentation-{number}{suffix}", classes(XYZ, number), orientation)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lits")
    for number, orientation in enumerate(("LPS", "RAS", "PIR", "SAL")):
        pair(folder, number, orientation, nifti.NIFTI_SUFFIXES[number % 2])
    return folder


def run(source: Path, out: Path, shape: Any = SHAPE, **how: Any) -> dict[str, ScanOutcome]:
    outcomes = convert_scans(find_pairs(source), out, shape=shape, **how)
    return {outcome.pair.name: outcome for outcome in outcomes}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_what_is_in_a_file(source: Path, tmp_path: Path) -> None:
    assert {o.state for o in run(source, tmp_path / "new/out").values()} == {"converted"}
    for number in range(4):
        with h5py.File(tmp_path / f"new/out/volume-{number}.hdf5") as file:
            assert sorted(file) == ["segmentation", "volume"]
            volume, segmentation = file["volume"], file["segmentation"]
            assert (volume.dtype, segmentation.dtype) == (np.int16, np.uint8)
            zyx = numbers(XYZ, number).transpose(2, 1, 0)
            expected = np.rint(resample.blurred_linear(zyx, SHAPE))
            np.testing.assert_array_equal(volume[0], expected)
            expected = resample.nearest(classes(XYZ, number).transpose(2, 1, 0), SHAPE)
            np.testing.assert_array_equal(segmentation[0], expected)
            attributes = dict(file.attrs)
            assert attributes["classes"].tolist() == [b"background", b"liver", b"tumour"]
            assert attributes["source_orientation"] == ("LPS", "RAS", "PIR", "SAL")[number]
            assert attributes["source"] == f"volume-{number}{nifti.NIFTI_SUFFIXES[number % 2]}"
            corner = affine_of() @ [*(np.array(XYZ) - 0.5), 1]  # the outer ones stay
            there = attributes["affine"] @ [*(np.array(SHAPE) - 0.5), 1]
            np.testing.assert_allclose(there, corner, atol=1e-4)
            np.testing.assert_allclose(
                attributes["spacing"], np.array((2.5, 0.8, 0.7)) * XYZ[::-1] / SHAPE, rtol=1e-6
            )
            image = nib.load(source / attributes["source"])
            np.testing.assert_array_equal(attributes["source_shape"], image.shape)
            np.testing.assert_array_equal(attributes["source_affine"], image.affine)


def test_the_converted_folder_opens(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path)
    data = open(tmp_path, Grid(), batch_size=4, split="all", window=(-100, 400))
    ((x, y),) = data.epoch(0)
    assert (x.shape, y.shape) == ((4, 1, *SHAPE), (4, *SHAPE))
    assert data.classes == ("background", "liver", "tumour")
    expected = resample.nearest(classes(XYZ, 2).transpose(2, 1, 0), SHAPE)
    np.testing.assert_array_equal(y.local[2], expected)


def test_values_beyond_int16_are_clipped(tmp_path: Path) -> None:
    values = np.array([-1e6, -40000, -0.5, 0.5, 1.5, 32767.4, 70000, 0, 1], "f4").reshape(9, 1, 1)
    write(tmp_path / "volume-0.nii", values)
    write(tmp_path / "segmentation-0.nii", np.zeros((9, 1, 1), "u1"))
    run(tmp_path, tmp_path / "out", (1, 1, 9))
    with h5py.File(tmp_path / "out/volume-0.hdf5") as file:
        expected = [-32768, -32768, 0, 0, 2, 32767, 32767, 0, 1]
        assert file["volume"][:].ravel().tolist() == expected


def test_what_cannot_be_converted_is_said_and_the_rest_is(tmp_path: Path) -> None:
    pair(tmp_path, 0)
    pair(tmp_path, 9)
    write(tmp_path / "volume-1.nii", numbers(XYZ))
    write(tmp_path / "segmentation-2.nii", classes(XYZ))
    write(tmp_path / "test-volume-3.nii", numbers(XYZ))
    pair(tmp_path, 4)
    path = tmp_path / "volume-4.nii"
    path.write_bytes(path.read_bytes()[:700])
    pair(tmp_path, 5)
    write(tmp_path / "segmentation-5.nii", classes((9, 8, 6)))
    pair(tmp_path, 6)
    write(tmp_path / "volume-6.nii", numbers((*XYZ, 3)))
    pair(tmp_path, 7)
    write(tmp_path / "segmentation-7.nii", classes(XYZ) * np.uint8(2))
    outcomes = run(tmp_path, tmp_path / "out")
    words = {
        "volume-1": "volume-1.nii: has no labels",
        "segmentation-2": "labels without a volume",
        "test-volume-3": "a test volume",
        "volume-4": "volume-4.nii: cannot be read",
        "volume-5": "segmentation-5.nii: has (6, 8, 9) voxels",
        "volume-6": "volume-6.nii: has 3 channels",
        "volume-7": "segmentation-7.nii: holds labels 0 to 4",
    }
    assert set(outcomes) == {"volume-0", "volume-9", *words}
    for name, reason in words.items():
        assert outcomes[name].state == "skipped"
        assert reason in outcomes[name].reason
    assert sorted(contents(tmp_path / "out")) == ["volume-0.hdf5", "volume-9.hdf5"]


def test_two_workers_make_the_same(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "one")
    done: list[ScanOutcome] = []
    run(source, tmp_path / "two", workers=2, done=done.append)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(done) == 4


def test_a_stopped_run_is_completed_to_the_same(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "whole")

    def stop(outcome: ScanOutcome) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        run(source, out, done=stop)
    assert sorted(contents(out)) == ["volume-0.hdf5"]
    (out / "volume-1.hdf5.77.partial").write_bytes(b"half a volume")
    before = (out / "volume-0.hdf5").stat().st_mtime_ns
    outcomes = run(source, out)
    assert [o.state for o in outcomes.values()] == ["kept", *["converted"] * 3]
    assert (out / "volume-0.hdf5").stat().st_mtime_ns == before
    (out / "volume-1.hdf5.77.partial").unlink()
    assert contents(out) == contents(tmp_path / "whole")


def test_another_folder_is_refused_before_anything_is_done(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path)
    (tmp_path / "volume-0.hdf5").unlink()
    with pytest.raises(
        DataError, match=r"volume-1\.hdf5 was made with size \(6, 4, 5\), not \(6, 6"
    ):
        run(source, tmp_path, (6, 6, 6))
    (tmp_path / "volume-3.hdf5").write_bytes((tmp_path / "volume-3.hdf5").read_bytes()[:900])
    with pytest.raises(DataError, match=r"volume-3\.hdf5 is not a converted volume .*delete it or"):
        run(source, tmp_path)
    assert not (tmp_path / "volume-0.hdf5").exists()


def test_a_pipe_or_a_group_in_place_of_a_volume_is_refused(source: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "volume-0.hdf5")
    with pytest.raises(DataError, match=r"volume-0\.hdf5 is not a plain file: delete it or"):
        run(source, tmp_path)
    (tmp_path / "volume-0.hdf5").unlink()
    with h5py.File(tmp_path / "volume-0.hdf5", "w") as file:
        file.create_group("volume")
    with pytest.raises(DataError, match=r"is not a converted volume .*'volume' is no data set"):
        run(source, tmp_path)


def test_another_source_of_the_same_name_is_refused(tmp_path: Path) -> None:
    for name, xyz in (("a", XYZ), ("b", (9, 8, 6))):
        write(tmp_path / name / "volume-0.nii", numbers(xyz))
        write(tmp_path / name / "segmentation-0.nii", classes(xyz))
    run(tmp_path / "a", tmp_path / "out")
    with pytest.raises(DataError, match=r"made from another file .*source_bytes is 1360, now"):
        run(tmp_path / "b", tmp_path / "out")


def test_a_full_disk_is_one_error_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot write .*volume-0\.hdf5"), full_disk():
        run(source, tmp_path, (16, 16, 16))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot make the folder .*file"):
        run(source, tmp_path / "file/out")


def die(*_: Any) -> None:
    os._exit(9)


def test_a_worker_that_dies_is_said(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["hyperslab.formats.convert.scans"], "_convert", die)
    with pytest.raises(HyperslabError, match=r"a worker died.*fewer workers"):
        run(source, tmp_path, workers=2)


def wait(pair: Any, folder: Path, shape: Any) -> None:
    (folder / str(os.getpid())).touch()
    time.sleep(100)


KILLED = """
import sys
from pathlib import Path
from hyperslab.formats.convert.scans import convert_scans
from hyperslab.formats.nifti.source import find_pairs
from tests.formats.convert.test_import_scans import wait

sys.modules["hyperslab.formats.convert.scans"]._convert = wait
convert_scans(find_pairs(Path(sys.argv[1])), Path(sys.argv[2]), shape=(2, 2, 2), workers=2)
"""


def test_workers_end_with_a_run_that_is_killed(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(source), str(out)]
    with forked_commands():
        run = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    with run:
        until(lambda: out.is_dir() and len(list(out.iterdir())) == 2)
        run.kill()
    workers = [Path("/proc", path.name) for path in out.iterdir()]
    until(lambda: not any(worker.exists() for worker in workers))


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("how", [{"shape": (0, 4, 4)}, {"workers": 0}, {"shape": (4, -1, 4)}])
def test_bad_arguments(source: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="need at least 1"):
        run(source, tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()


def test_a_box_is_read_without_the_rest(tmp_path: Path) -> None:
    pair(tmp_path, 0)
    run(tmp_path, tmp_path / "out", (64, 64, 64))
    half = 64**3 // 2 * 3
    for cut in range(3):
        with h5py.File(tmp_path / "out/volume-0.hdf5") as file:
            box = tuple(slice(0, 32 if dim == cut else 64) for dim in range(3))
            before = os_bytes_read()
            for key in ("volume", "segmentation"):
                assert file[key][(0, *box)].size == 64**3 // 2
            assert 1 <= (os_bytes_read() - before) / half < 1.05
