"""A CSV file that lists scans: the columns image, label and, if wanted, split.

::

    # classes: background, liver, tumour
    image,label,split
    a/ct.nii.gz,a/mask.nii.gz,train
    b/ct.nii.gz,b/mask.nii.gz,test

With columns ``image_T1, image_T2, ...`` in place of ``image`` each is a channel. Paths are relative
to the file. Splits are train, validation and test.
"""

from __future__ import annotations

import csv
from pathlib import Path

from hyperslab.errors import DataError, printable
from hyperslab.formats.nifti.scan_list import (
    MOST_BYTES,
    ScanList,
    check_class_names,
    distinct,
    scan_of,
)
from hyperslab.formats.shared.checks import ANY, naming
from hyperslab.formats.shared.reach import Reach

CLASSES = "classes:"

SPLIT_WORDS = {"train": "train", "training": "train", "test": "test"} | dict.fromkeys(
    ("validation", "val", "valid"), "validation"
)


def read_csv_list(path: Path, reach: Reach) -> ScanList:
    """The scans that the file lists.

    Raises:
        DataError: it does not name the classes, has no columns image and label, a row lacks one of
            them or has another split, a path leaves the folder, or a file is not there.
    """
    with naming(path, "a list of scans (CSV)", ANY):
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{path}: is larger than {MOST_BYTES} bytes, and no list of scans")
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    notes = [line.lstrip("# ").strip() for line in lines if line.startswith("#")]
    with naming(path, "a list of scans (CSV)", ANY):
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    columns = [key for key in (rows[0] if rows else {}) if key is not None]
    images = [key for key in columns if key == "image" or key.startswith("image_")]
    if not images or "label" not in columns:
        raise DataError(
            f"{path}: has the columns {', '.join(columns) or '(none)'}; needs image (or one for "
            "each channel: image_T1, image_T2) and label, and may have split"
        )
    pairs = []
    parts = []
    for number, row in enumerate(rows, 1):
        what = f"row {number}"
        values = [(row.get(key) or "").strip() for key in (*images, "label")]
        if not all(values) or None in row:
            raise DataError(f"{path}: {what} has {row}; needs a value in each column")
        with naming(path, "a list of scans (CSV)", ANY):  # names of any length
            pairs.append(scan_of(path, values[:-1], values[-1], reach, what))
        parts.append(_split(path, what, row))
    named = distinct(path, pairs)
    channels = tuple(printable(key.removeprefix("image_")) for key in images) if images[1:] else ()
    splits = {pair.name: part for pair, part in zip(named, parts, strict=True) if part}
    if splits and len(splits) < len(named):
        words = f"{len(splits)} of {len(named)} rows have a split"
        raise DataError(f"{path}: {words}; give all of them one, or none")
    return ScanList(named, _classes(path, notes), channels, splits)


def _split(path: Path, what: str, row: dict[str, str]) -> str:
    word = (row.get("split") or "").strip().lower()
    if word and word not in SPLIT_WORDS:
        raise DataError(f"{path}: {what} has the split {word!r}; use train, validation or test")
    return SPLIT_WORDS.get(word, "")


def _classes(path: Path, notes: list[str]) -> tuple[str, ...]:
    for note in notes:
        if note.lower().startswith(CLASSES):
            names = [printable(name.strip()) for name in note[len(CLASSES) :].split(",")]
            return check_class_names(path, names)
    raise DataError(
        f"{path}: does not name the classes; put them first, as in: "
        "# classes: background, liver, tumour"
    )
