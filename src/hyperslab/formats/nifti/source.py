"""Reads and writes folders of NIfTI files: scans with labels, as published (the extra `medical`).

Scans are found by the names of files, by a dataset.json, or by a CSV file; docs/formats.md (Scans)
has the forms. By their names: LiTS's ``volume-N.nii`` and ``segmentation-N.nii``, in one folder or
in several, or the Medical Segmentation Decathlon's ``imagesTr/liver_N.nii.gz`` and the same name in
``labelsTr``; ``test-volume-N`` and ``imagesTs`` have no labels. A `dataset.json` is the
Decathlon's, or MONAI's of this kind, or of nnU-Net's second version. Its paths are relative to it.

Axes are those of `image`, and the box that is read is turned as they are. Channels are along a
file's fourth dim, or each has a file. A ``.nii.gz`` has no random access: each box unpacks all that
lies before its end. Files are written with the names of LiTS or the Decathlon, along the patient's
axes.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from hyperslab.errors import DataError, printable, system_errors_as
from hyperslab.formats import files, optional
from hyperslab.formats.files import ANY, FileAccess, naming, walk_folder
from hyperslab.formats.nifti import resample
from hyperslab.formats.nifti.image import (
    NIFTI,
    NIFTI_SUFFIXES,
    NiftiFile,
    check_channels,
    check_lattice,
    open_nifti,
)
from hyperslab.formats.source import Array, Extras, ScanOptions, Source
from hyperslab.formats.storage import FILE_BUFFER, Storage
from hyperslab.formats.targets import LIVER, SCAN_KEYS, as_classes, check_class_names
from hyperslab.formats.writer import SampleToWrite, Writer, open_gzip_writer
from hyperslab.geometry import Box
from hyperslab.util.atomic_files import write_json
from hyperslab.util.documents import read_bytes, value_of_json

PairKey = tuple[str, int]

PAIR_NAME = re.compile(
    r"(test-volume|volume|segmentation)-(\d+)\.nii(?:\.gz)?|liver_(\d+)\.nii(?:\.gz)?"
)

MSD_ROLES = {"imagesTr": "image", "labelsTr": "labels", "imagesTs": "test"}
LITS_ROLES = {"volume": "image", "segmentation": "labels", "test-volume": "test"}


@dataclass(frozen=True, slots=True)
class Pair:
    """One volume with its labels, or the ``problem`` why there is none."""

    name: str
    image: Path
    labels: Path
    problem: str = ""
    test: bool = False  # it was published without labels
    channels: tuple[Path, ...] = ()  # files of those after the first, where each has its own

    @property
    def images(self) -> tuple[Path, ...]:
        """Returns the files of all channels."""
        return self.image, *self.channels


def find_pairs(folder: Path) -> list[Pair]:
    """Returns the pairs in a folder and its sub-folders, by number; hidden files are left out."""
    if not folder.is_dir():
        raise DataError(f"{folder}: is not a folder; give the one that holds the NIfTI files")
    found: dict[PairKey, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path in map(folder.joinpath, walk_folder(folder)):
        role = None if path.is_dir() else _role(path)
        if role is not None:
            key, kind = role
            found[key][kind].append(path)
    if not found:
        raise DataError(
            f"{folder}: no volume-N.nii[.gz] or imagesTr/liver_N.nii[.gz] in it or below\n"
            "    name other scans in a dataset.json or a CSV list (docs/formats.md, scans)"
        )
    return [_pair(found[key]) for key in sorted(found)]


def nifti_stem(path: Path) -> str:
    """Returns the name without .nii or .nii.gz."""
    return path.name.removesuffix(".gz").removesuffix(".nii")


def _role(path: Path) -> tuple[PairKey, str] | None:
    match = PAIR_NAME.fullmatch(path.name)
    if match is None:
        return None
    if match[1]:
        role = LITS_ROLES[match[1]]
        return ("LiTS test" if role == "test" else "LiTS", int(match[2])), role
    role = MSD_ROLES.get(path.parent.name, "")
    return (("MSD test" if role == "test" else "MSD", int(match[3])), role) if role else None


def _pair(files: dict[str, list[Path]]) -> Pair:
    images = files["image"] + files["test"]
    labels = files["labels"]
    one = (images or labels)[0]
    for paths in (images, labels):
        if len(paths) > 1:
            names = " and ".join(map(str, paths))
            return Pair(nifti_stem(one), one, one, f"there are {names}; keep one of them")
    if files["test"]:
        return Pair(
            nifti_stem(one), one, one, f"{one}: a test volume, published without labels", True
        )
    if not (images and labels):
        lacks = "has no labels" if images else "labels without a volume"
        return Pair(nifti_stem(one), one, one, f"{one}: {lacks}")
    return Pair(nifti_stem(one), one, labels[0])


LARGEST_LIST = 256 * 1024 * 1024
"""The largest list that is read [B]: millions of scans."""

DATASET_JSON = "dataset.json"

SPLIT_KEYS = {"training": "train", "validation": "validation", "testing": "test"}
"""Splits by the keys of a list that deals out its scans; the Decathlon has the first alone."""

SPLIT_WORDS = {"": "", "train": "train", "training": "train", "test": "test"} | dict.fromkeys(
    ("validation", "val", "valid"), "validation"
)

CLASSES_COMMENT = "classes:"


@dataclass(frozen=True, slots=True)
class ScanList:
    """Scans with their labels, and what is said of all of them."""

    pairs: tuple[Pair, ...]
    classes: tuple[str, ...] = LIVER  # the names of the labels 0, 1, 2, ...
    channels: tuple[str, ...] = ()  # what they are, where somebody says so
    # By a pair's name, where the list deals them out.
    splits: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class _Entry:
    """Describes the entry ``what`` of a list; its paths are relative to that."""

    what: str
    images: Sequence[str]
    labels: str
    split: str = ""
    name: str = ""  # of the scan, where it is not the first file's


_Content = tuple[Sequence[str], tuple[str, ...], Sequence[_Entry]]
"""Names of classes, names of channels, and what is listed."""


def read_list(path: Path, reach: FileAccess) -> ScanList:
    """Returns the scans with labels that a .csv file or a `dataset.json` lists.

    Errors of entries, classes, and paths that leave the folder or are missing name the list.
    """
    with naming(path, "a list of scans", ANY):
        classes, channels, entries = _content_of(path)
        pairs = _distinct(path, [_pair_of(path, entry, reach) for entry in entries])
    check_class_names(classes, f"{path}: the names of the classes")
    if not pairs:
        raise DataError(f"{path}: lists no scan with labels")
    parts = zip(pairs, entries, strict=True)
    splits = {pair.name: entry.split for pair, entry in parts if entry.split}
    if splits and len(splits) < len(pairs):
        words = f"{len(splits)} of {len(pairs)} rows have a split"
        raise DataError(f"{path}: {words}; give all of them one, or none")
    return ScanList(pairs, tuple(classes), channels, splits)


def labels_of_list(path: Path) -> list[Path]:
    """Returns the files of labels that a list names; none where it is no list of scans."""
    with suppress(DataError), naming(path, "a list of scans", ANY):
        _, _, entries = _content_of(path)
        return [path.parent / entry.labels for entry in entries]
    return []


def _content_of(path: Path) -> _Content:
    text = read_bytes(path, LARGEST_LIST).decode("utf-8-sig")
    return _of_csv(path, text) if path.suffix == ".csv" else _of_json(path, text)


def _pair_of(path: Path, entry: _Entry, reach: FileAccess) -> Pair:
    """Finds the files of an entry, NIfTI files in the folder of the list."""
    files = [path.parent / file for file in (*entry.images, entry.labels)]
    for file in files:
        if not file.name.endswith(NIFTI_SUFFIXES):
            raise DataError(
                f"{path}: {entry.what} refers to {file}, which is not a NIfTI file: its name ends "
                f"in neither {' nor '.join(NIFTI_SUFFIXES)}"
            )
        if not file.exists():
            raise DataError(f"{path}: {entry.what} refers to {file}, which is not there")
        reach.check(path, entry.what, file)
    first, *others, labels = files
    return Pair(entry.name or nifti_stem(first), first, labels, channels=tuple(others))


def _distinct(path: Path, pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Returns the pairs by names that differ: where those of files are alike, with their folders.

    A file that is listed twice is refused. No name leads out of a folder that is filled with files
    of these names.
    """
    count = Counter(pair.name for pair in pairs)
    renamed = []
    for pair in pairs:
        name = pair.name
        place = Path(os.path.relpath(pair.image, path.parent))  # a/../b/ct.nii is b/ct.nii
        if count[name] > 1 and ".." not in place.parts:
            name = (place.parent / name).as_posix()
        renamed.append(replace(pair, name=name))
    again = Counter(pair.name for pair in renamed).most_common(1)
    if again and again[0][1] > 1:
        raise DataError(f"{path}: lists {again[0][0]} {again[0][1]} times")
    return tuple(renamed)


def _of_csv(path: Path, text: str) -> _Content:
    """Parses a CSV list, see the docstring of the module."""
    lines = text.splitlines()
    table = csv.reader(line for line in lines if not line.startswith("#"))
    columns = [_column(name) for name in next(table, [])]
    twice = [name for name, count in Counter(columns).items() if name and count > 1]
    if twice:
        raise DataError(f"{path}: has the column {twice[0]!r} twice; remove one of them")
    images = [key for key in columns if key == "image" or key.startswith("image_")]
    if not images or "label" not in columns:
        raise DataError(
            f"{path}: has the columns {', '.join(columns) or '(none)'}; needs image (or one for "
            "each channel: image_T1, image_T2) and label, and may have split"
        )
    entries = []
    for number, cells in enumerate(filter(None, table), 1):
        what = f"row {number}"
        row = dict(zip(columns, map(str.strip, cells), strict=False))
        values = [row.get(key, "") for key in (*images, "label")]
        if not all(values) or len(cells) > len(columns):
            raise DataError(f"{path}: {what} has {row}; needs a value in each column")
        word = row.get("split", "").lower()
        if word not in SPLIT_WORDS:
            raise DataError(f"{path}: {what} has the split {word!r}; use train, validation or test")
        entries.append(_Entry(what, values[:-1], values[-1], SPLIT_WORDS[word]))
    channels = tuple(printable(key.removeprefix("image_")) for key in images) if images[1:] else ()
    notes = (line.lstrip("# ").strip() for line in lines if line.startswith("#"))
    note = next((note for note in notes if note.lower().startswith(CLASSES_COMMENT)), None)
    if note is None:
        raise DataError(
            f"{path}: does not name the classes; put them first, as in: "
            "# classes: background, liver, tumour"
        )
    names = note[len(CLASSES_COMMENT) :].split(",")
    return [printable(name.strip()) for name in names], channels, entries


def _column(name: str) -> str:
    """Returns the name of a column; those that are known in any case, as spreadsheets have them."""
    name = name.strip()
    return name.lower() if name.lower() in ("image", "label", "split") else name


def _of_json(path: Path, text: str) -> _Content:
    """Parses the Decathlon's list or nnU-Net's."""
    content = value_of_json(text, strict=True)
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds a {type(content).__name__}, not a JSON object")
    classes = _classes_in_json(path, content)
    channels = _channels(path, content)
    if "training" in content:
        entries = list(_entries_of_decathlon(path, content, len(channels)))
        if {entry.split for entry in entries} == {"train"}:
            entries = [replace(entry, split="") for entry in entries]
    elif "channel_names" in content or "file_ending" in content:
        entries = list(_entries_of_nnunet(path, content, max(1, len(channels))))
    else:
        raise DataError(
            f"{path}: has neither training (Medical Segmentation Decathlon) nor channel_names "
            "and file_ending (nnU-Net)"
        )
    return classes, channels, entries


def _classes_in_json(path: Path, content: Mapping[str, Any]) -> list[str]:
    """Returns the names of 0, 1, 2, ...: from ``{"0": name}`` or ``{name: 0}``."""
    labels = content.get("labels")
    if not isinstance(labels, dict) or not labels:
        raise DataError(f"{path}: has no labels, such as {{'0': 'background', '1': 'liver'}}")
    by_number: dict[int, str] = {}
    for key, value in labels.items():
        number, name = (key, value) if str(key).isdecimal() else (value, key)
        if isinstance(number, list) or name == "ignore":
            raise DataError(
                f"{path}: label {printable(str(name))!r} is {number}: regions of several labels "
                "and voxels to be ignored are not supported; give every voxel one class"
            )
        by_number[int(number)] = printable(str(name))
    if sorted(by_number) != list(range(len(labels))):
        raise DataError(
            f"{path}: its labels are the numbers {sorted(by_number)}; needs 0 to "
            f"{len(labels) - 1}, each once: renumber them in the files of labels"
        )
    return [by_number[number] for number in sorted(by_number)]


def _channels(path: Path, content: Mapping[str, Any]) -> tuple[str, ...]:
    found = content.get("channel_names", content.get("modality"))
    if isinstance(found, str):  # some lists of one modality
        return (printable(found),)
    if not isinstance(found, dict):
        if found is None:
            return ()
        raise DataError(f"{path}: its channels are {found!r}; needs names by number")
    numbers = sorted(int(key) for key in found)
    if numbers != list(range(len(numbers))):
        raise DataError(f"{path}: its channels are the numbers {numbers}; needs 0, 1, 2, ...")
    return tuple(printable(str(found[str(number)])) for number in numbers)


def _entries_of_decathlon(
    path: Path, content: Mapping[str, Any], channels: int
) -> Iterator[_Entry]:
    """Yields the Decathlon's scans; and MONAI's, which may be to validate or test on."""
    for key, split in SPLIT_KEYS.items():
        for number, entry in enumerate(content.get(key, [])):
            what = f"{key}[{number}]"
            if split == "test" and not (isinstance(entry, dict) and "label" in entry):
                continue  # published without labels
            labels = entry.get("label") if isinstance(entry, dict) else None
            if not (labels and isinstance(labels, str) and "image" in entry):
                raise DataError(f"{path}: {what} is {entry!r}; needs image and label")
            images = entry["image"] if isinstance(entry["image"], list) else [entry["image"]]
            if len(images) == 1:
                images = _suffixed(path.parent, str(images[0]), channels)
            yield _Entry(what, list(map(str, images)), labels, split)


def _suffixed(folder: Path, image: str, channels: int) -> list[str]:
    """Returns the files of an image: nnU-Net's first version lists them without their channels."""
    if (folder / image).exists():
        return [image]
    ending = next((e for e in NIFTI_SUFFIXES[::-1] if image.endswith(e)), "")
    base = image.removesuffix(ending)
    found = [f"{base}_{channel:04}{ending}" for channel in range(max(1, channels))]
    return found if (folder / found[0]).exists() else [image]


def _entries_of_nnunet(path: Path, content: Mapping[str, Any], channels: int) -> Iterator[_Entry]:
    """Yields nnU-Net's scans, listed or by the names in its folders."""
    if isinstance(listed := content.get("dataset"), dict):
        for case, entry in listed.items():
            what = f"dataset[{case!r}]"
            if not isinstance(entry, dict) or not {"images", "label"} <= entry.keys():
                raise DataError(f"{path}: {what} is {entry!r}; needs images and label")
            yield _Entry(what, list(entry["images"]), str(entry["label"]))
        return
    ending = str(content.get("file_ending", ".nii.gz"))
    if ending not in NIFTI_SUFFIXES:
        raise DataError(
            f"{path}: its file_ending is {ending!r}; {' and '.join(NIFTI_SUFFIXES)} are read"
        )
    for file in sorted((path.parent / "labelsTr").glob(f"*{ending}")):
        if not file.name.startswith("."):
            case = nifti_stem(file)
            images = [f"imagesTr/{case}_{channel:04}{ending}" for channel in range(channels)]
            yield _Entry(f"the case {case!r}", images, f"labelsTr/{file.name}", name=case)


def write_dataset_json(
    path: Path,
    pairs: Sequence[Pair],
    classes: Sequence[str],
    channels: Sequence[str] = (),
    splits: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Lists the pairs as the Decathlon does, those to validate and test on as MONAI does.

    Several channels without names stay so: the list says nothing of them.
    """
    count = len(channels) or open_nifti(pairs[0].image).shape[0]
    if count == 1 and not channels:
        channels = ("image",)
    keys = {split: key for key, split in SPLIT_KEYS.items()}
    parts: dict[str, list[dict[str, str]]] = {"training": []}
    for pair in pairs:
        key = keys[splits.get(pair.name, "train")]
        entry = {"image": _below(path, pair.image), "label": _below(path, pair.labels)}
        parts.setdefault(key, []).append(entry)
    content = {
        "name": path.parent.name,
        "tensorImageSize": "4D" if count > 1 else "3D",
        **(
            {"modality": dict(zip(map(str, range(count)), channels, strict=True))}
            if channels
            else {}
        ),
        "labels": {str(number): name for number, name in enumerate(classes)},
        "numTraining": len(parts["training"]),
        "numTest": 0,
        **parts,
        "test": [],
    }
    with system_errors_as(DataError, f"cannot write {path}", named=False):
        write_json(path, content)


def _below(path: Path, file: Path) -> str:
    return f"./{file.relative_to(path.parent).as_posix()}"


@dataclass(frozen=True, slots=True)
class ScanHeader:
    """Holds what a source needs to know of a volume (C, D, H, W) and its labels.

    ``stamps``: of the volume's files, and that of the labels last, from before they were read.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    voxel: tuple[float, ...]  # (D, H, W) [mm]
    label_bytes: int
    stamps: tuple[files.Stamp, ...]


class NiftiFolder(Source):
    """Shows scans with a class for every voxel; volumes published without are left out.

    Values have slope and intercept applied (HU for a CT): int16 where the numbers of all files are
    such and need none, else float32.
    """

    suffixes = NIFTI_SUFFIXES
    lists = (".json", ".csv")
    summed_whole = True
    concurrent = True

    def __init__(self, listed: ScanList, headers: Sequence[ScanHeader]) -> None:
        self.headers = tuple(headers)
        self.names = [pair.name for pair in listed.pairs]
        shapes = tuple(header.shape for header in headers)
        self.shape = max(shapes, key=math.prod)
        self.shapes = shapes if len(set(shapes)) > 1 else ()
        self.dtype = np.result_type(*(header.dtype for header in headers))
        self.classes = listed.classes
        self.label_bytes = max(header.label_bytes for header in headers)
        self.channel_names = listed.channels
        self.splits = {name: listed.splits[name] for name in self.names if name in listed.splits}
        self.listed = replace(listed, splits=self.splits)  # which can be pickled

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> NiftiFolder:
        """Opens a folder, or a list itself: a .json or .csv file."""
        listed = listed_scans(folder, options.allowed)
        pairs = [pair for pair in listed.pairs if not pair.test]
        if not pairs:
            raise DataError(f"{folder}: holds test volumes only, which have no labels")
        found = files.sift(pairs, read_scan_header, options.refuse)
        channels = len(listed.channels) or found[0][1].shape[0]

        def alike(entry: tuple[Pair, ScanHeader]) -> None:
            pair, header = entry
            if header.shape[0] != channels:
                words = ", ".join(listed.channels) or f"{found[0][0].image.name} has {channels}"
                raise DataError(
                    f"{pair.image}: has {header.shape[0]} channels, not {channels}: {words}"
                )

        good = [entry for entry, _ in files.sift(found, alike, options.refuse)]
        kept = replace(listed, pairs=tuple(pair for pair, _ in good))
        return cls(kept, [header for _, header in good])

    def where(self, sample: int) -> str:
        return str(self.listed.pairs[sample].image)

    def read(self, sample: int, box: Box) -> Array:
        """Reads a box, channel by channel where each has a file. Raises as `ArrayFolder.read`."""
        pair = self.listed.pairs[sample]
        shape = self.shape_of(sample)
        if not pair.channels:
            return self._values(sample, 0, shape, box)
        inner = Box((0, *box.lo[1:]), (1, *box.hi[1:]))
        one = (1, *shape[1:])
        parts = [self._values(sample, c, one, inner) for c in range(box.lo[0], box.hi[0])]
        return np.concatenate(parts)

    def _values(self, sample: int, file: int, shape: tuple[int, ...], box: Box) -> Array:
        """Reads a box of the ``file``-th of the sample's files, which has ``shape``."""
        path = self.listed.pairs[sample].images[file]
        values = self._read(sample, file, path, shape, box)
        if not np.can_cast(values.dtype, self.dtype):
            raise DataError(
                f"{path}: is read as {values.dtype} but was {self.dtype} when the folder was "
                "scanned"
            )
        return values.astype(self.dtype, copy=False)

    def _read(self, sample: int, file: int, path: Path, shape: tuple[int, ...], box: Box) -> Array:
        with files.unchanged(path, self.names[sample], self.headers[sample].stamps[file]):
            found = open_nifti(path)
            if found.shape != shape:
                raise DataError(
                    f"{path}: has {found.shape[1:]} voxels but had {shape[1:]} when the folder "
                    "was scanned"
                )
            return found.read(box)

    def labels(self, sample: int, box: Box) -> Array:
        """Reads the classes of one box; errors as `read`, and labels that are no classes."""
        path = self.listed.pairs[sample].labels
        shape = (1, *self.shape_of(sample)[1:])
        values = self._read(sample, -1, path, shape, Box((0, *box.lo), (1, *box.hi)))
        return as_classes(whole_labels(values), f"{path}: {box}")

    def storage(self, sample: int) -> Storage:
        """Describes the first channel's file, where each has its own."""
        file = open_nifti(self.listed.pairs[sample].image)
        order = file.order.reversed  # the file's first index is fastest
        shape = file.extents[::-1]
        size = file.path.stat().st_size
        plain = Storage(order, shape, file.itemsize, size, buffer=FILE_BUFFER)
        return replace(plain, compression="gzip", packed=True) if file.packed else plain

    def extras(self, sample: int) -> Extras:
        return Extras(SCAN_KEYS, affine=open_nifti(self.listed.pairs[sample].image).affine)

    def voxel_size(self, sample: int) -> tuple[float, ...]:
        return self.headers[sample].voxel

    def files(self, sample: int) -> tuple[Path, ...]:
        pair = self.listed.pairs[sample]
        return *pair.images, pair.labels

    def alone(self, sample: int) -> NiftiFolder:
        pair = self.listed.pairs[sample]
        found = NiftiFolder(replace(self.listed, pairs=(pair,)), self.headers[sample : sample + 1])
        found.dtype = self.dtype  # of all
        return found


def listed_scans(folder: Path, allowed: files.AccessPolicy) -> ScanList:
    """Lists the scans of a list, or of a folder with or without one."""
    path = folder / DATASET_JSON if folder.is_dir() else folder
    if folder.is_dir() and not path.is_file():
        return ScanList(tuple(find_pairs(folder)))
    return read_list(path, files.FileAccess(path.parent, allowed))


def open_pair(pair: Pair) -> tuple[list[NiftiFile], NiftiFile]:
    """Opens the files of a scan's channels, and that of its labels; they have to fit together."""
    if pair.problem:
        raise DataError(pair.problem)
    images = [open_nifti(path) for path in pair.images]
    check_channels(images)
    labels = open_nifti(pair.labels)
    if labels.shape[0] != 1:
        raise DataError(f"{pair.labels}: has {labels.shape[0]} channels; needs one label a voxel")
    check_lattice(labels, images[0])
    return images, labels


LABEL_ROUNDING = 1e-3
"""A label that a slope, such as 1 / 255, has moved by less than that from a whole number is it."""


def whole_labels(labels: Array) -> Array:
    """Rounds labels that a slope has moved; what lies between two classes stays as it is."""
    if labels.dtype.kind != "f":
        return labels
    with np.errstate(invalid="ignore"):  # infinite ones are no classes either
        whole = np.rint(labels)
        return np.where(np.abs(labels - whole) < LABEL_ROUNDING, whole, labels)


def read_scan_header(pair: Pair) -> ScanHeader:
    """Reads the headers of a scan's files; refuses files that do not belong together."""
    stamps = tuple(_stamp(path) for path in (*pair.images, pair.labels))
    images, labels = open_pair(pair)
    channels, *extents = images[0].shape
    dtype = np.result_type(*(image.dtype for image in images))
    voxel = tuple(resample.spacing(images[0].affine).tolist())
    shape = (max(channels, len(images)), *extents)
    return ScanHeader(shape, dtype, voxel, labels.itemsize, stamps)


def _stamp(path: Path) -> files.Stamp:
    with files.naming(path, NIFTI, files.ANY):
        return files.Stamp.of(path)


LITS_NAME = re.compile(r"volume-(\d+)")
MOST_VOXELS = 32767
MSD_NAME = re.compile(r"liver_(\d+)")


class NiftiWriter(Writer):
    """Writes one channel with labels, its axes along the patient's (RAS+)."""

    compressions = ("none", "gzip")
    labels = True

    def misfit(self, source: Source) -> str:
        if not source.classes:
            return "targets"
        if source.shape[0] != 1:
            return f"{source.shape[0]} channels"
        if source.dtype not in (np.dtype(np.int16), np.dtype(np.float32)):
            return f"{source.dtype.name}, which is read from it as float32"
        if max(source.shape) > MOST_VOXELS:
            return f"more than {MOST_VOXELS} voxels along a dim"
        if source.classes != LIVER:
            return f"the names of the classes {', '.join(source.classes)}"
        for name in source.names:
            if not any(kind.fullmatch(name.rpartition("/")[2]) for kind in (LITS_NAME, MSD_NAME)):
                return f"the name {name!r}: its files are known as volume-N or liver_N"
        return ""

    def names(self, source: Source, root: str) -> list[str]:
        return [name.rpartition("/")[2] for name in source.names]

    def files(self, name: str, compression: str) -> tuple[str, ...]:
        suffix = ".nii" if compression == "none" else ".nii.gz"
        if MSD_NAME.fullmatch(name):
            return f"labelsTr/{name}{suffix}", f"imagesTr/{name}{suffix}"
        return f"{name.replace('volume', 'segmentation')}{suffix}", f"{name}{suffix}"

    def write(self, folder: Path, name: str, sample: SampleToWrite) -> None:
        labels, volume = (folder / file for file in self.files(name, sample.compression))
        affine = sample.extras.affine
        xyz = np.eye(4) if affine is None else np.asarray(affine)[:, [2, 1, 0, 3]]
        header = optional.nibabel().Nifti1Header()
        header.set_data_shape(sample.source.shape[:0:-1])
        header.set_zooms(np.linalg.norm(xyz[:3, :3], axis=0))
        header.set_sform(xyz, code="scanner")
        header.set_xyzt_units("mm")
        for path, dtype, slabs in (
            (volume, sample.source.dtype, sample.values()),
            (labels, np.dtype(np.uint8), sample.labels()),
        ):
            with open_gzip_writer(path, sample.compression) as file:
                header.set_data_dtype(dtype)
                header.write_to(file)
                for _, slab in slabs:  # (x, y, z), x fastest, is (D, H, W) in the order of C
                    file.write(np.ascontiguousarray(slab).tobytes())
