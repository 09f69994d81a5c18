"""What is refused of volumes with a class for every voxel (tier: no process)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hyperslab as hs
from hyperslab.data import Parameters, Source, open
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.scans import folder, hu, labels, scan
from tests.formats.universes import Seat, counts, public, write

SHAPE = (1, 7, 6, 5)


@pytest.mark.parametrize("transform", ["log1p", "mean"])
def test_a_transform_of_counts_refuses_hu(tmp_path: Path, transform: str) -> None:
    folder(tmp_path, 1)
    data = open(tmp_path, Seat(), batch_size=1, split="all", transform=transform)
    with pytest.raises(hs.DataError, match=r"volume-0.hdf5.*negative counts, down to -1"):
        next(data.epoch(0))


def spoilt(value: Any, dtype: str) -> Any:
    bad = labels(0, SHAPE).astype(dtype)
    bad[0, 6, 0, 2] = value
    return bad


VALUES: dict[str, tuple[Any, str]] = {
    "too many classes": (spoilt(4, "uint8"), "holds label 4 but there are 4 classes: background"),
    "of a byte's": (spoilt(255, "uint8"), "holds label 255"),
    "negative": (spoilt(-1, "int8"), "labels that are not classes"),
    "too large": (spoilt(256, "int16"), "labels that are not classes"),
    "a fraction": (spoilt(1.5, "float32"), "labels that are not classes"),
    "NaN": (spoilt(np.nan, "float32"), "labels that are not classes"),
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_bad_label_is_an_error_for_the_rank_that_reads_it(tmp_path: Path, kind: str) -> None:
    segmentation, message = VALUES[kind]
    scan(tmp_path / "bad.hdf5", segmentation=segmentation)
    source = source_of(tmp_path, Seat())
    upper, lower = (open(source, seat, batch_size=1, split="all") for seat in Seat.all(depth=2))
    assert len(list(upper.epoch(0))) == 1
    with pytest.raises(hs.DataError, match=f"bad.hdf5.*Box.*{message}"):
        list(lower.epoch(0))


def test_channels_that_differ(tmp_path: Path) -> None:
    scan(tmp_path / "a.h5", shape=(2, 4, 4, 4), segmentation=labels(0, (2, 4, 4, 4)))
    with pytest.raises(hs.DataError, match=r"a\.h5.*channels of labels are not equal"):
        next(open(tmp_path, Seat(), batch_size=1, split="all").epoch(0))


def cut_short(path: Path) -> None:
    scan(path)
    path.write_bytes(path.read_bytes()[:-300])


HEADERS: dict[str, tuple[Any, str]] = {
    "truncated": (cut_short, "truncated"),
    "no labels": (lambda p: scan(p, segmentation=None), "no data set 'segmentation'"),
    "no volume": (lambda p: scan(p, volume=None), r"not a known layout.*\['segmentation'\]"),
    "a group": (
        lambda p: (scan(p, segmentation=None), h5py.File(p, "a").create_group("segmentation")),
        "no data set 'segmentation'",
    ),
    "shape of labels": (
        lambda p: scan(p, segmentation=labels(0, (1, 7, 6, 4))),
        r"shape \(1, 7, 6, 4\) but 'volume' has \(1, 7, 6, 5\)",
    ),
    "channels of labels": (lambda p: scan(p, segmentation=labels(0, (3, 7, 6, 5))), "has shape"),
    "dims of labels": (lambda p: scan(p, segmentation=labels(0, (7, 6, 5))), r"\(7, 6, 5\) but"),
    "dims": (lambda p: scan(p, volume=hu(0, (7, 6, 5))), "three spatial dims and channels"),
    "dtype": (lambda p: scan(p, volume=hu(0, SHAPE, "int32")), "int32; needs one of"),
    "text": (lambda p: scan(p, segmentation=np.full(SHAPE, "a", "S1")), "needs numbers"),
    "one class": (lambda p: scan(p, classes=("background",)), "needs 2 to 256 different"),
    "classes alike": (lambda p: scan(p, classes=("a", "b", "b")), "'classes' are a, b, b; needs"),
    "a number": (lambda p: scan(p, classes=3), "'classes' are 3; needs"),
    "other classes": (lambda p: scan(p, classes=("a", "b", "c")), "classes is .* stored alike"),
    "other labels": (
        lambda p: scan(p, segmentation=labels(0, SHAPE).astype("int16")),
        "label_dtype is int16 but uint8 in",
    ),
    "universe": (lambda p: public(p, counts(0, (7, 7, 7, 4))), "key is full but volume in"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_bad_file_is_named(tmp_path: Path, kind: str) -> None:
    make, message = HEADERS[kind]
    folder(tmp_path, 2)
    (tmp_path / "z").mkdir()
    make(tmp_path / "z/bad.hdf5")
    with pytest.raises(hs.DataError, match=f"(?s)z/bad.hdf5.*{message}"):
        source_of(tmp_path, Seat())


def test_channels_come_first(tmp_path: Path) -> None:
    folder(tmp_path, 2)
    with pytest.raises(hs.DataError, match="channels come first"):
        open(tmp_path, Seat(), batch_size=1, channels="last", split="all")
    assert open(tmp_path, Seat(), batch_size=1, channels="first", split="all").shape == SHAPE


def test_labels_that_change_or_go_are_an_error(tmp_path: Path) -> None:
    folder(tmp_path, 2)
    source = source_of(tmp_path, Seat())
    scan(tmp_path / "volume-0.hdf5", segmentation=labels(0, SHAPE).astype("int32"))
    write(tmp_path / "volume-1.hdf5", volume=hu(1, SHAPE))
    whole = Box.whole(SHAPE[1:])
    with pytest.raises(hs.DataError, match=r"volume-0.*has changed since"):
        source.labels(0, whole)
    with pytest.raises(hs.DataError, match=r"volume-1\.hdf5.*has changed since"):
        source.labels(1, whole)


class Own(Source):
    """A user's: volumes that count up, and what the test says for labels."""

    def __init__(self, labelled: Any) -> None:
        self.names, self.shape, self.dtype = ["a"], (1, 3, 3, 3), np.dtype("int16")
        self.classes = ("no", "yes")
        self.labelled = labelled

    def read(self, sample: int, box: Box) -> Any:
        return np.zeros(box.shape, self.dtype)

    def labels(self, sample: int, box: Box) -> Any:
        return self.labelled


@pytest.mark.parametrize(
    ("labelled", "message"),
    [
        (np.zeros((3, 3, 3), "i8"), "int64, not uint8"),
        (np.zeros((3, 3), "u1"), r"Box.*was read as \(3, 3\)"),
        (np.full((3, 3, 3), 2, "u1"), "holds label 2 but there are 2 classes: no, yes"),
    ],
)
def test_a_source_of_ones_own(labelled: Any, message: str) -> None:
    data = open(Own(np.ones((3, 3, 3), "u1")), Seat(), batch_size=1, split="all")
    ((_, y),) = data.epoch(0)
    assert y.local.unique().tolist() == [1]
    assert data.targets == ()
    with pytest.raises(hs.DataError, match=f"sample 'a'.*{message}"):
        next(open(Own(labelled), Seat(), batch_size=1, split="all").epoch(0))


def test_a_source_with_nothing_to_find() -> None:
    class Nothing(Source):
        names, shape, dtype = ("a",), (1, 2, 2, 2), np.dtype("int16")
        parameters = Parameters.normalised(())

        def read(self, sample: int, box: Box) -> Any:
            return np.zeros(box.shape, self.dtype)

    with pytest.raises(NotImplementedError, match="Nothing has neither targets nor classes"):
        next(open(Nothing(), Seat(), batch_size=1, split="all").epoch(0))
    Nothing.classes = ("a", "b")
    with pytest.raises(NotImplementedError, match="Nothing has classes but no labels"):
        next(open(Nothing(), Seat(), batch_size=1, split="all").epoch(0))
