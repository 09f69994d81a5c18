"""dataset.json and CSV lists, in the published layouts and spoilt (tier: no process)."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

import hyperslab as hs
from hyperslab.geometry import Box
from tests.formats.nifti.lists import CLASSES, SHAPES, Case, case, decathlon, listed, nnunet, save
from tests.formats.opening import source_of
from tests.formats.universes import Seat


def check(source: hs.Source, cases: list[Case]) -> None:
    assert len(source.names) == len(cases)
    for sample, (values, labels) in enumerate(cases):
        shape = source.shape_of(sample)
        assert shape == values.shape
        np.testing.assert_array_equal(source.read(sample, Box.whole(shape)), values)
        np.testing.assert_array_equal(source.labels(sample, Box.whole(shape[1:])), labels)
        part = Box((0, 2, 1, 3), (shape[0], 5, 6, 7))
        np.testing.assert_array_equal(source.read(sample, part), values[part.slices()])
    assert source.classes == CLASSES
    assert source.shape == max((v.shape for v, _ in cases), key=np.prod)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_decathlon(tmp_path: Path, channels: int) -> None:
    cases = decathlon(tmp_path / "Task01", channels=channels)
    for path in (tmp_path / "Task01", tmp_path / "Task01/dataset.json"):
        source = source_of(path, Seat())
        check(source, cases)
        assert list(source.names) == [f"BRATS_{number:03}" for number in range(4)]
        assert source.channel_names == ("FLAIR", "T1w", "t1gd")[:channels]


@pytest.mark.parametrize("channels", [1, 2])
def test_nnunet(tmp_path: Path, channels: int) -> None:
    cases = nnunet(tmp_path, channels=channels)
    source = source_of(tmp_path, Seat())
    check(source, cases)
    assert source.channel_names == (("T1", "T2") if channels == 2 else ("CT",))
    assert source.names[2] == "case_002"
    assert len(source.files(2)) == channels + 1
    one = source.alone(1)
    np.testing.assert_array_equal(one.read(0, Box.whole(one.shape)), cases[1][0])


def test_nnunet_that_lists_its_cases(tmp_path: Path) -> None:
    cases = nnunet(tmp_path)
    content = json.loads((tmp_path / "dataset.json").read_text())
    content["dataset"] = {
        f"case_{n:03}": {
            "images": [f"imagesTr/case_{n:03}_{c:04}.nii.gz" for c in range(2)],
            "label": f"labelsTr/case_{n:03}.nii.gz",
        }
        for n in (0, 1)
    }
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    check(source_of(tmp_path, Seat()), cases[:2])


def test_a_csv_list_and_its_splits(tmp_path: Path) -> None:
    cases = listed(tmp_path)
    source = source_of(tmp_path / "scans.csv", Seat())
    check(source, cases)
    assert list(source.names) == ["p0/ct", "p1/ct", "p2/ct", "p3/ct"]
    for split, names in {"train": ["p0/ct", "p1/ct"], "validation": ["p2/ct"]}.items():
        with hs.open(tmp_path / "scans.csv", Seat(), batch_size=1, split=split) as data:
            assert sorted(data.names()) == names
    with hs.open(
        tmp_path / "scans.csv", Seat(), batch_size=1, split="test", counts=(None, 1, 2)
    ) as data:
        assert len(data) == 2, "who counts deals them out anew"


def test_paths_of_a_csv_list_are_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to the current folder, where files of these names lie, too."""
    cases = listed(tmp_path / "there")
    listed(tmp_path, SHAPES[::-1])
    monkeypatch.chdir(tmp_path)
    check(source_of(Path("there/scans.csv"), Seat()), cases)


def test_a_csv_list_as_a_spreadsheet_writes_it(tmp_path: Path) -> None:
    """With a byte order mark, CRLF, blanks, capitals and empty columns; the splits are not lost."""
    cases = listed(tmp_path)
    path = tmp_path / "scans.csv"
    rows = path.read_text().replace("image,label,split", "Image, Label, Split").splitlines()
    path.write_bytes(b"\xef\xbb\xbf" + "".join(f"{row},,\r\n" for row in rows[1:]).encode())
    path.write_bytes(path.read_bytes() + f"{rows[0]}\r\n".encode())
    source = source_of(path, Seat())
    check(source, cases)
    assert source.splits == {"p0/ct": "train", "p1/ct": "train"} | {
        "p2/ct": "validation",
        "p3/ct": "test",
    }


def test_channels_of_a_csv_list(tmp_path: Path) -> None:
    values, labels = case(0, (6, 5, 7), 2)
    for name, part in (("t1.nii", values[0]), ("t2.nii", values[1] / np.float32(2))):
        save(tmp_path / name, part)
    save(tmp_path / "m.nii", labels)
    rows = [["image_T1", "image_T2", "label"], ["t1.nii", "t2.nii", "m.nii"]]
    with (tmp_path / "a.csv").open("w") as file:
        file.write("# classes: background, edema, tumour\n")
        csv.writer(file).writerows(rows)
    source = source_of(tmp_path / "a.csv", Seat())
    assert source.channel_names == ("T1", "T2")
    assert source.dtype == np.float32, "one file is int16, the other is not"
    found = source.read(0, Box.whole(source.shape))
    np.testing.assert_array_equal(found, np.stack([values[0], values[1] / 2]).astype("f4"))


def change(**changes: Any) -> Callable[[Path], object]:
    """Other keys in the list; None takes one away."""

    def spoil(folder: Path) -> None:
        content = json.loads((folder / "dataset.json").read_text()) | changes
        kept = {key: value for key, value in content.items() if value is not None}
        (folder / "dataset.json").write_text(json.dumps(kept))

    return spoil


def entry(image: str, label: str = "labelsTr/BRATS_000.nii.gz") -> Callable[[Path], object]:
    return change(training=[{"image": image, "label": label}])


def labels(folder: Path, values: Any, spacing: tuple[float, ...] = (0.9, 1.2, 2.5)) -> None:
    save(folder / "labelsTr/BRATS_001.nii.gz", values, spacing)


def outside(folder: Path) -> None:
    save(folder.parent / "secret.nii", case(0, (9, 8, 10))[0][0])
    entry("../secret.nii")(folder)


def key_twice(folder: Path) -> None:
    text = (folder / "dataset.json").read_text()
    (folder / "dataset.json").write_text(text.replace("{", '{"labels": {"0": "a", "1": "b"}, ', 1))


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "a key twice": (key_twice, "list of scans.*it has the key 'labels' twice in one object"),
    "a label twice": (
        lambda d: (d / "dataset.json").write_text('{"labels": {"0": "a", "1": "b", "1": "c"}}'),
        "it has the key '1' twice in one object",
    ),
    "no number": (change(numTraining=float("nan")), "list of scans.*NaN is no number of JSON"),
    "no end": (change(numTest=float("inf")), "Infinity is no number of JSON"),
    "no JSON": (lambda d: (d / "dataset.json").write_text("{'a'"), "cannot be read as a list"),
    "cut short": (
        lambda d: (d / "dataset.json").write_text((d / "dataset.json").read_text()[:-9]),
        "cannot be read as a list of scans",
    ),
    "nested": (
        lambda d: (d / "dataset.json").write_text("[" * 99999),
        "cannot be read as a list of scans",
    ),
    "a list": (lambda d: (d / "dataset.json").write_text("[1]"), "holds a list"),
    "no labels": (change(labels=None), "has no labels"),
    "gaps": (change(labels={"0": "a", "2": "b", "4": "c"}), r"numbers \[0, 2, 4\]; needs 0 to 2"),
    "regions": (change(labels={"background": 0, "whole": [1, 2]}), "regions of several labels"),
    "ignored": (change(labels={"background": 0, "a": 1, "ignore": 2}), "'ignore' is 2: regions"),
    "twice the name": (change(labels={"0": "a", "1": "a"}), "needs 2 to 256 different"),
    "words": (change(labels={"0": "a", "b": "one"}), "cannot be read as a list of scans"),
    "channels": (change(modality={"0": "CT", "2": "MR"}), r"channels are the numbers \[0, 2\]"),
    "more channels": (change(modality={"0": "CT", "1": "PT"}), "has 1 channels, not 2: CT, PT"),
    "neither": (change(training=None), "neither training .* nor channel_names"),
    "nothing": (change(training=[]), "lists no scan"),
    "not a pair": (change(training=["imagesTr/BRATS_000.nii.gz"]), r"training\[0\] is 'imagesTr"),
    "no file": (
        change(training=[{"image": "imagesTr/BRATS_000.nii.gz", "label": None}]),
        r"training\[0\] is \{.*None\}; needs image and label",
    ),
    "gone": (entry("imagesTr/BRATS_999.nii.gz"), r"training\[0\] refers to .* not there"),
    "no NIfTI": (entry("/etc/passwd"), r"dataset.json: training\[0\] refers to /etc/passwd, which"),
    "outside": (outside, r"dataset.json: training\[0\] refers to .*secret.nii, which is not in"),
    "twice": (
        change(
            training=2 * [{k: f"{k}sTr/BRATS_000.nii.gz" for k in ("image", "label")}],
        ),
        "lists .*BRATS_000 2 times",
    ),
    "truncated image": (
        lambda d: (d / "imagesTr/BRATS_001.nii.gz").write_bytes(
            (d / "imagesTr/BRATS_001.nii.gz").read_bytes()[:90]
        ),
        "imagesTr/BRATS_001.nii.gz: cannot be read as NIfTI",
    ),
    "labels of another shape": (
        lambda d: labels(d, np.zeros((7, 11, 9), np.uint8)),
        r"labelsTr/BRATS_001.nii.gz: has \(7, 11, 9\) voxels .* has \(7, 11, 8\)",
    ),
    "labels elsewhere": (
        lambda d: labels(d, np.zeros((7, 11, 8), np.uint8), (0.9, 1.2, 3.5)),
        "labelsTr/BRATS_001.nii.gz: its affine is off by",
    ),
    "labels with channels": (
        lambda d: labels(d, np.zeros((2, 7, 11, 8), np.uint8)),
        "labelsTr/BRATS_001.nii.gz: has 2 channels; needs one label",
    ),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_bad_list_is_named(tmp_path: Path, kind: str) -> None:
    spoil, words = SPOILT[kind]
    folder = tmp_path / "task"
    decathlon(folder)
    spoil(folder)
    with pytest.raises(hs.DataError, match=f"(?s)^{folder}/.*{words}"):
        source_of(folder, Seat())


CSVS = {
    "a name that no system takes": (
        f"# classes: a, b\nimage,label\n{'x' * 3000}.nii,p0/mask.nii\n",
        "cannot be read as a list of scans.*File name too long",
    ),
    "no classes": ("image,label\np0/ct.nii,p0/mask.nii\n", "does not name the classes"),
    "columns": ("# classes: a, b\nscan,label\nx,y\n", "has the columns scan, label; needs image"),
    "a value": ("# classes: a, b\nimage,label\np0/ct.nii,\n", "row 1 has .*needs a value"),
    "more values": ("# classes: a, b\nimage,label\na,b,c,d\n", "row 1 has .*needs a value"),
    "split": (
        "# classes: a, b\nimage,label,split\np0/ct.nii,p0/mask.nii,fold1\n",
        "row 1 has the split 'fold1'",
    ),
    "outside": ("# classes: a, b\nimage,label\n../x.nii,p0/mask.nii\n", "row 1 refers to .*not in"),
    "empty": ("", r"has the columns \(none\)"),
    "no rows": ("# classes: a, b\nimage,label\n", "lists no scan"),
    "a column twice": (
        "# classes: a, b\nimage,label,label\np0/ct.nii,p0/mask.nii,p1/mask.nii\n",
        "has the column 'label' twice",
    ),
    "one file, named in two ways": (
        "# classes: a, b\nimage,label\np0/ct.nii,p0/mask.nii\np1/../p0/ct.nii,p0/mask.nii\n",
        "lists p0/ct 2 times",
    ),
}


@pytest.mark.parametrize("kind", CSVS)
def test_a_bad_csv_list_is_named(tmp_path: Path, kind: str) -> None:
    text, words = CSVS[kind]
    listed(tmp_path / "d")
    save(tmp_path / "x.nii", case(0, (9, 8, 10))[0][0])
    path = tmp_path / "d/scans.csv"
    path.write_text(text)
    with pytest.raises(hs.DataError, match=f"(?s)^{path}: {words}"):
        source_of(path, Seat())


def test_outside_files_are_a_users_choice(tmp_path: Path) -> None:
    decathlon(tmp_path / "task")
    values = case(0, (9, 8, 10))[0]
    save(tmp_path / "more.nii", values[0])
    entry("../more.nii")(tmp_path / "task")
    data = hs.open(tmp_path / "task", Seat(), batch_size=1, split="all", outside_files=True)
    np.testing.assert_array_equal(data.source.read(0, Box.whole(values.shape)), values)


def test_labels_that_a_slope_has_rounded(tmp_path: Path) -> None:
    """As of masks that some programs store as 0 and 255."""
    decathlon(tmp_path)
    found = np.zeros((7, 11, 8), np.uint8)
    found[1:4, 2:5, 3:6] = 1
    labels(tmp_path, found * 255)
    path = tmp_path / "labelsTr/BRATS_001.nii.gz"
    raw = bytearray(gzip.decompress(path.read_bytes()))
    raw[112:120] = np.array([1 / 255, 0], "<f4").tobytes()
    path.write_bytes(gzip.compress(raw))
    assert (nibabel.load(path).get_fdata() % 1).any()
    source = source_of(tmp_path, Seat())
    np.testing.assert_array_equal(source.labels(1, Box.whole(found.shape)), found)


def test_what_is_no_class_or_no_number_is_named(tmp_path: Path) -> None:
    decathlon(tmp_path)
    wrong = np.full((7, 11, 8), 3, np.uint8)
    labels(tmp_path, wrong)
    data = hs.open(tmp_path, Seat(), batch_size=1, split="all")
    path = tmp_path / "imagesTr/BRATS_001.nii.gz"
    with pytest.raises(hs.DataError, match=f"^{path}.*holds label 3 but there are 3 classes"):
        list(data.epoch(0))
    spoilt = np.zeros((7, 11, 8), np.float32)
    spoilt[3, 3, 3] = np.nan
    save(path, spoilt)
    data = hs.open(tmp_path, Seat(), batch_size=1, split="all")
    with pytest.raises(hs.DataError, match=f"^{path}.*holds NaN"):
        list(data.epoch(0))
