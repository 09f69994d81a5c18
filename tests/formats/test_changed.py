"""Files that change or vanish after the folder was scanned, in every format (tier: no process)."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.data import NiftiFolder, Source, open
from hyperslab.formats import optional
from hyperslab.formats.arrays import hdf5
from hyperslab.formats.nifti.image import NiftiFile
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.scans import hu, labels
from tests.formats.universes import Seat, counts, public
from tests.formats.writers import (
    AXES,
    FORMATS,
    mlperf,
    nifti,
    niftis,
    npy,
    tfrecords,
    universes,
    zarrs,
)
from tests.selection import in_gate

SAMPLE = 1


def touch(path: Path) -> None:
    """The least that counts as a change."""
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def write_into(path: Path) -> None:
    """Other bytes of equal number, later."""
    data = path.read_bytes()
    path.write_bytes(bytes(byte ^ 1 for byte in data))
    touch(path)


def replace(path: Path) -> None:
    """Another file under the same name: what is open still shows the old one."""
    other = path.with_name("other")
    shutil.copyfile(path, other)
    touch(other)
    os.replace(other, path)


def pipe(path: Path) -> None:
    """What a read would wait for without an end."""
    path.unlink()
    os.mkfifo(path)


CHANGES = {f.__name__: f for f in (touch, cut, grow, write_into, replace, pipe)}


def stamped(source: Source, whose: str) -> Path:
    """The file that is compared: of Zarr what says what the array is."""
    path = Path(source.where(SAMPLE))
    if path.suffix == ".zarr":
        keys = [path / key for key in ("full", "volume") if (path / key).exists()]
        return (keys[0] if whose == "values" else path / "segmentation") / "zarr.json"
    if isinstance(source, NiftiFolder) and whose == "labels":
        return source.listed.pairs[SAMPLE].labels
    return path


def ask(source: Source, whose: str, sample: int = SAMPLE) -> Any:
    if whose == "labels":
        return source.labels(sample, Box.whole(source.shape[1:]))
    return source.read(sample, Box.whole(source.shape))


STATES = ("closed", "open")
CASES = list(itertools.product(FORMATS, (*CHANGES, "unlink"), STATES))
IN_TURN = {
    (name, change, STATES[(i + j) // 2 % 2])
    for i, name in enumerate(FORMATS)
    for j, change in enumerate((*CHANGES, "unlink"))
    if (i + j) % 2 == 0
}


@pytest.mark.parametrize(("name", "change", "state"), in_gate(CASES, kept=IN_TURN))
def test_a_change_is_an_error_that_names_file_and_sample(
    tmp_path: Path, name: str, change: str, state: str
) -> None:
    volumes = FORMATS[name](tmp_path)
    source = source_of(tmp_path, Seat())
    for whose in ("values", "labels") if source.classes else ("values",):
        before = ask(source, whose) if state == "open" else None
        path = stamped(source, whose)
        kept = path.with_name("kept")
        shutil.copy2(path, kept)
        CHANGES.get(change, Path.unlink)(path)
        word = "gone" if change == "unlink" else "changed"
        words = f"{path}: sample '{source.names[SAMPLE]}' has {word} since the folder was scanned"
        with pytest.raises(hs.DataError, match=f"(?s){words}.*open the folder again"):
            ask(source, whose)
        np.testing.assert_array_equal(source.read(0, Box.whole(source.shape)), volumes[0])
        os.replace(kept, path)  # as it was, its time too
        after = ask(source, whose)
        np.testing.assert_array_equal(after, after if before is None else before)


def hook(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Do something in the middle of the next reads."""
    preadv, read = os.preadv, NiftiFile.read

    def then(found: Any) -> Any:
        change()
        return found

    monkeypatch.setattr(os, "preadv", lambda *args: then(preadv(*args)))
    monkeypatch.setattr(NiftiFile, "read", lambda *args: then(read(*args)))
    for where, name in ((hdf5, "read_box"), (optional.zarr().Array, "__getitem__")):
        found = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *args, found=found: then(found(*args)))


DURING = {
    "HDF5": universes,
    "npy": npy("first"),
    "TFRecord": tfrecords(False),
    "Zarr": zarrs,
    "NIfTI": niftis(".nii", False),
}


@pytest.mark.parametrize("change", ["touch", "cut", "grow"])
@pytest.mark.parametrize("kind", DURING)
def test_a_change_during_the_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, change: str
) -> None:
    DURING[kind](tmp_path)
    source = source_of(tmp_path, Seat())
    hook(monkeypatch, lambda: CHANGES[change](stamped(source, "values")))
    with pytest.raises(hs.DataError, match="has changed since the folder was scanned"):
        ask(source, "values")


@pytest.mark.parametrize("kind", ["npy", "TFRecord"])
def test_a_file_cut_short_between_two_reads_of_a_box_does_not_end_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A mapping would get SIGBUS here."""
    shape = (1, 8, 128, 128)
    if kind == "npy":
        np.save(tmp_path / "v0.npy", counts(0, shape[1:]))
        (tmp_path / "targets.csv").write_text("name,a\nv0,1")
        source: Source = source_of(tmp_path, Seat())
    else:
        mlperf(tmp_path / "u.tfrecord", 0, x=counts(0, shape[1:]).tobytes())
        source = hs.data.TfRecordFolder.scan(tmp_path, Seat(), shape=(*shape[1:], 1))
    path = Path(source.where(0))
    hook(monkeypatch, lambda: os.truncate(path, min(path.stat().st_size, 40000)))
    with pytest.raises(hs.DataError, match=r"(?s)has changed.*40000 bytes") as caught:
        source.read(0, Box((0, 0, 0, 0), (1, 8, 64, 128)))
    assert "ends at byte 40000" in str(caught.value.__cause__)


def test_an_open_file_that_is_cut_short_does_not_read_as_zeros(tmp_path: Path) -> None:
    """HDF5 fills up with zeros what lies behind the end of a file that was longer when opened."""
    public(tmp_path / "u.hdf5", counts(0, (24, 24, 24, 4)) + 1)
    source = source_of(tmp_path, Seat())
    source.read(0, Box((0, 0, 0, 0), (1, 1, 1, 1)))
    cut(tmp_path / "u.hdf5")
    opener: Any = source.reader
    assert not opener._file(tmp_path / "u.hdf5")["full"][-1].any(), (
        "else this test is not needed any more"
    )
    with pytest.raises(hs.DataError, match="has changed"):
        source.read(0, Box.whole(source.shape))


SAME: dict[str, tuple[Callable[[Path], Any], str, Callable[[Path], Any]]] = {
    "HDF5": (
        lambda d: public(d / "u.hdf5", counts(0, (6, 6, 6, 4))),
        "u.hdf5",
        lambda p: public(p, counts(0, (6, 6, 4, 6))),
    ),
    "npy": (npy("first"), "v0.npy", lambda p: np.save(p, counts(0, (7, 4, 7, 7)))),
}


@pytest.mark.parametrize("kind", SAME)
def test_another_shape_is_noticed_in_a_file_of_equal_size_and_time(
    tmp_path: Path, kind: str
) -> None:
    make, name, change = SAME[kind]
    make(tmp_path)
    source, path = source_of(tmp_path, Seat()), tmp_path / name
    then = path.stat()
    change(path)
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert path.stat().st_size == then.st_size
    with pytest.raises(hs.DataError, match=rf"{name}.* is int16 .* but was int16 .*scanned"):
        source.read(0, Box.whole(source.shape))


def packed_scans(folder: Path) -> None:
    """Larger than what is read of a file to know that it is one."""
    for i in range(2):
        nifti(folder / f"volume-{i}.nii.gz", hu(i, (30, 20, 10)), AXES[i])
        nifti(folder / f"segmentation-{i}.nii.gz", labels(i, (30, 20, 10)), AXES[i])


SHORT: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "TFRecord gzip": (tfrecords(True), "univ_1.tfrecord", "TFRecord"),
    "NIfTI": (niftis(".nii", False), "volume-1.nii", "NIfTI"),
    "NIfTI gzip": (packed_scans, "volume-1.nii.gz", "NIfTI"),
    "Zarr": (zarrs, "univ_1.zarr/full/c/0/0/0/0", "Zarr"),
}


@pytest.mark.parametrize("kind", SHORT)
def test_what_was_cut_short_before_and_only_shows_when_it_is_read(
    tmp_path: Path, kind: str
) -> None:
    make, name, word = SHORT[kind]
    make(tmp_path)
    path = tmp_path / name
    os.truncate(path, path.stat().st_size * 9 // 10)
    source = source_of(tmp_path, Seat())
    assert ask(source, "values", 0) is not None
    with pytest.raises(hs.DataError, match=f"{name.split('/')[0]}: cannot be read as {word}"):
        ask(source, "values")


def test_the_others_are_shown_where_the_user_says_skip(tmp_path: Path) -> None:
    volumes = universes(tmp_path)
    how: Any = {"batch_size": 1, "split": "all", "transform": None, "on_error": "skip"}
    with open(tmp_path, Seat(), **how) as data:
        (tmp_path / "univ_1.hdf5").unlink()
        shown = [x.local.numpy()[0] for x, _ in data.epoch(0)]
    assert [x.tobytes() for x in shown] == [volumes[i].astype("f4").tobytes() for i in (0, 2)]


def test_a_packed_sample_in_memory_is_of_the_file_as_it_is(tmp_path: Path) -> None:
    tfrecords(True)(tmp_path)
    source = source_of(tmp_path, Seat())
    ask(source, "values")
    assert 1 in source._kept  # type: ignore[attr-defined]
    mlperf(tmp_path / "univ_1.tfrecord", 1, True, y=np.zeros(4))
    touch(tmp_path / "univ_1.tfrecord")
    with pytest.raises(hs.DataError, match="has changed"):
        ask(source, "values")


def test_labels_of_another_file_do_not_matter_to_the_values(tmp_path: Path) -> None:
    niftis(".nii", False)(tmp_path)
    source = source_of(tmp_path, Seat())
    touch(tmp_path / "segmentation-1.nii")
    ask(source, "values")
    np.testing.assert_array_equal(ask(source, "labels", 0), labels(0, (1, *source.shape[1:]), 3)[0])


def test_a_file_written_anew_is_read_although_another_source_has_it_open(tmp_path: Path) -> None:
    """HDF5 knows an open file by its number, which stays where it is written in its place."""
    for i in range(2):
        public(tmp_path / "data" / f"u{i}.h5", counts(i, (7, 7, 7, 4)), i)
    source = source_of(tmp_path / "data", Seat())
    whole = Box.whole(source.shape)
    for i in range(2):
        source.read(i, whole)
        other = tmp_path / f"other{i}.h5"
        public(other, counts(i + 5, (7, 7, 7, 4)), i, redshifts=None, namePar=None)
        (tmp_path / "data" / f"u{i}.h5").write_bytes(other.read_bytes())
    again = source_of(tmp_path / "data", Seat())
    for i in range(2):
        expected = np.moveaxis(counts(i + 5, (7, 7, 7, 4)), -1, 0)
        np.testing.assert_array_equal(again.read(i, whole), expected)
        with pytest.raises(hs.DataError, match="has changed since"):
            source.read(i, whole)
    again.close()
