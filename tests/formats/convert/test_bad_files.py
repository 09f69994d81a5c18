"""Bad files among good ones, and those that change meanwhile (tier: no process)."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hyperslab.errors import DataError
from hyperslab.formats.convert import Outcome, Request, convert
from hyperslab.formats.convert import run as work
from hyperslab.formats.files import AccessPolicy
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.scans import folder as scans_folder
from tests.formats.universes import Seat, counts, folder, public
from tests.formats.writers import FORMATS

ROOT = Path(__file__).parents[3]


def run(source: Path, out: Path, format: str = "hdf5", **how: Any) -> list[Outcome]:
    request = {key: how.pop(key) for key in ("cut", "width", "compression") if key in how}
    return convert(source, out, Request(format, **request), **how)  # type: ignore[arg-type]


def failed(outcomes: list[Outcome]) -> list[str]:
    return [outcome.reason for outcome in outcomes if outcome.state == "failed"]


def cut_short(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def other_shape(path: Path) -> None:
    path.unlink()
    public(path, counts(0, (8, 8, 8, 4)))


def not_a_number(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["unitPar"][1] = np.nan


BAD: dict[str, tuple[str, str, Callable[[Path], Any], str]] = {
    "truncated": ("public HDF5", "univ_1.hdf5", cut_short, "cannot be read as HDF5"),
    "of text": ("public HDF5", "univ_1.hdf5", lambda p: p.write_text("no HDF5"), "cannot be read"),
    "of another shape": ("public HDF5", "univ_1.hdf5", other_shape, "stored is (8, 8, 8, 4) but"),
    "target": ("public HDF5", "univ_1.hdf5", not_a_number, "needs finite numbers"),
    "no labels": ("NIfTI", "segmentation-1.nii", Path.unlink, "volume-1.nii: has no labels"),
    "labels cut short": ("NIfTI", "segmentation-1.nii", cut_short, "segmentation-1.nii: cannot be"),
    "gzip cut short": (
        "NIfTI gzip",
        "imagesTr/liver_1.nii.gz",
        cut_short,
        "liver_1.nii.gz: cannot be read",
    ),
    "record": ("TFRecord", "univ_1.tfrecord", cut_short, "needs one whole record"),
    "packed record": ("TFRecord gzip", "univ_1.tfrecord", cut_short, "univ_1.tfrecord: cannot be"),
    "array": ("npy first", "v1.npy", cut_short, "v1.npy: cannot be read as npy"),
    "no target": ("npy first", "v1.target.npy", Path.unlink, "nor v1.target.npy is there"),
    "group": ("Zarr", "univ_1.zarr/zarr.json", Path.unlink, "univ_1.zarr: cannot be read as Zarr"),
    "chunk": (
        "Zarr",
        "univ_1.zarr/full/c/1/0/0/0",
        lambda p: p.write_bytes(b"no chunk"),
        "univ_1.zarr: cannot be read as Zarr",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_among_good_ones(tmp_path: Path, kind: str) -> None:
    """It is named, the others are converted; mended, it follows."""
    format, name, spoil, words = BAD[kind]
    volumes = FORMATS[format](tmp_path / "src")
    shutil.copytree(tmp_path / "src", tmp_path / "good")
    spoil(tmp_path / "src" / name)
    outcomes = run(tmp_path / "src", tmp_path / "out")
    (reason,) = failed(outcomes)
    assert words in reason
    assert str(tmp_path / "src") in reason
    assert [o.state for o in outcomes].count("converted") == 2
    out = source_of(tmp_path / "out", Seat())
    assert len(out.names) == 2
    for sample, volume in enumerate((volumes[0], volumes[2])):
        assert out.read(sample, Box.whole(out.shape)).tobytes() == volume.tobytes()
    out.close()
    shutil.rmtree(tmp_path / "src")
    shutil.copytree(tmp_path / "good", tmp_path / "src")
    outcomes = run(tmp_path / "src", tmp_path / "out")
    assert sorted(o.state for o in outcomes) == ["converted", "kept", "kept"]


def test_all_bad(tmp_path: Path) -> None:
    folder(tmp_path / "src", 2)
    for path in (tmp_path / "src").rglob("*.hdf5"):
        cut_short(path)
    with pytest.raises(DataError, match=r"a/univ_000.hdf5: cannot be read"):
        run(tmp_path / "src", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_values_that_cannot_be_right(tmp_path: Path) -> None:
    for i in range(3):
        public(tmp_path / f"src/u{i}.hdf5", counts(i, (5, 5, 5, 4), "float32"), i)
    with h5py.File(tmp_path / "src/u1.hdf5", "a") as file:
        file["full"][4, 0, 2, 1] = np.inf
    (reason,) = failed(run(tmp_path / "src", tmp_path / "out"))
    assert "u1.hdf5: Box" in reason
    assert "NaN or infinite" in reason


def test_labels_without_a_class(tmp_path: Path) -> None:
    scans_folder(tmp_path / "src", 2)
    with h5py.File(tmp_path / "src/volume-0.hdf5", "a") as file:
        file["segmentation"][0, 3, 2, 1] = 9
    (reason,) = failed(run(tmp_path / "src", tmp_path / "out", "zarr"))
    assert "volume-0.hdf5" in reason
    assert "label 9" in reason
    assert [p.name for p in (tmp_path / "out").glob("*.zarr")] == ["volume-1.zarr"]


@pytest.mark.parametrize("what", ["goes", "changes"])
def test_a_source_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    folder(tmp_path / "src", 3)
    path = tmp_path / "src/a/univ_001.hdf5"
    write = work._written

    def spoil(source: Any, job: Any) -> Any:
        done = write(source, job)
        if job.name == "a/univ_001":
            path.unlink() if what == "goes" else os.utime(path, (1, 1))
        return done

    monkeypatch.setattr(work, "_written", spoil)
    (reason,) = failed(run(tmp_path / "src", tmp_path / "out"))
    assert "a/univ_001.hdf5: " in reason
    assert ("has changed while it was read" if what == "changes" else "No such file") in reason
    assert len(source_of(tmp_path / "out", Seat()).names) == 2


def test_what_fits_into_no_memory_is_named_and_left_out(tmp_path: Path) -> None:
    """A layer of it has 2^45 bytes, and none of them is stored."""
    with h5py.File(tmp_path / "huge.hdf5", "w") as file:
        file.create_dataset("full", (64, 1 << 22, 1 << 22, 1), "i2", chunks=(32, 32, 32, 1))
        file["unitPar"] = np.zeros(4, np.float32)
    (source := tmp_path / "from").mkdir()
    (tmp_path / "huge.hdf5").rename(source / "huge.hdf5")
    allowed = AccessPolicy(missing_chunks=True)
    (reason,) = failed(run(source, tmp_path / "to", allowed=allowed, channels="last"))
    assert re.search(r"huge\.hdf5: no memory is left for it: Unable to allocate", reason)
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["conversion.jsonl"]
