"""`dataset.json`: the list of the Medical Segmentation Decathlon, and that of nnU-Net.

The Decathlon's has ``training`` (``image`` and ``label`` of each scan), ``labels`` by number and
``modality``; MONAI's lists of this kind may have ``validation`` and ``testing`` too, and several
files for an image. nnU-Net's second version has ``channel_names``, ``labels`` by name and
``file_ending``; its scans are ``imagesTr/{case}_{channel:04}`` and ``labelsTr/{case}``, or are
listed in ``dataset``. Paths are relative to the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hyperslab.atomic_files import write_json
from hyperslab.errors import DataError, printable
from hyperslab.formats.nifti.pairs import Pair, stem
from hyperslab.formats.nifti.scan_list import (
    MOST_BYTES,
    NIFTI_ENDINGS,
    ScanList,
    check_class_names,
    distinct,
    scan_of,
)
from hyperslab.formats.shared.checks import ANY, naming
from hyperslab.formats.shared.reach import Reach

DATASET_JSON = "dataset.json"

SPLIT_KEYS = {"training": "train", "validation": "validation", "testing": "test"}
"""Of lists that deal out their scans, the split of each key; the Decathlon has the first alone."""

Content = Mapping[str, Any]


def read_dataset_json(path: Path, reach: Reach) -> ScanList:
    """The scans with labels that the file lists.

    Raises:
        DataError: it is no JSON of one of the two kinds, its labels are not 0, 1, 2, ..., a path
            leaves the folder, or a file is not there; all errors name the list.
    """
    with naming(path, "a list of scans (JSON)", ANY):
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{path}: is larger than {MOST_BYTES} bytes, and no list of scans")
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds a {type(content).__name__}, not a JSON object")
    with naming(path, "a list of scans", ANY):
        classes = _classes(path, content)
        channels = _channels(path, content)
    splits: dict[str, str] = {}
    with naming(path, "a list of scans", ANY):
        if "training" in content:
            pairs, splits = _listed(path, content, channels, reach)
        elif "channel_names" in content or "file_ending" in content:
            pairs = _cases(path, content, channels, reach)
        else:
            raise DataError(
                f"{path}: has neither training (Medical Segmentation Decathlon) nor channel_names "
                "and file_ending (nnU-Net)"
            )
    if not pairs:
        raise DataError(f"{path}: lists no scan with labels")
    return ScanList(pairs, classes, channels, splits)


def write_dataset_json(
    path: Path,
    pairs: Sequence[Pair],
    classes: Sequence[str],
    channels: Sequence[str] = (),
    splits: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """List the pairs as the Decathlon does, those to validate and test on as MONAI does.

    Raises:
        DataError: it cannot be written.
    """
    keys = {split: key for key, split in SPLIT_KEYS.items()}
    parts: dict[str, list[dict[str, str]]] = {"training": []}
    for pair in pairs:
        key = keys[splits.get(pair.name, "train")]
        entry = {"image": _below(path, pair.image), "label": _below(path, pair.labels)}
        parts.setdefault(key, []).append(entry)
    content = {
        "name": path.parent.name,
        "tensorImageSize": "4D" if len(channels) > 1 else "3D",
        "modality": {str(number): name for number, name in enumerate(channels or ("image",))},
        "labels": {str(number): name for number, name in enumerate(classes)},
        "numTraining": len(parts["training"]),
        "numTest": 0,
        **parts,
        "test": [],
    }
    try:
        write_json(path, content)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error


def _below(path: Path, file: Path) -> str:
    return f"./{file.relative_to(path.parent).as_posix()}"


def _classes(path: Path, content: Content) -> tuple[str, ...]:
    """The names of 0, 1, 2, ...: from ``{"0": name}`` or ``{name: 0}``."""
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
    return check_class_names(path, [by_number[number] for number in sorted(by_number)])


def _channels(path: Path, content: Content) -> tuple[str, ...]:
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


def _listed(
    path: Path, content: Content, channels: tuple[str, ...], reach: Reach
) -> tuple[tuple[Pair, ...], dict[str, str]]:
    """The Decathlon's; with ``validation`` or ``testing`` also the split of each."""
    pairs: list[Pair] = []
    parts: list[str] = []
    for key, split in SPLIT_KEYS.items():
        for number, entry in enumerate(content.get(key, [])):
            what = f"{key}[{number}]"
            if split == "test" and not (isinstance(entry, dict) and "label" in entry):
                continue  # published without labels
            if not isinstance(entry, dict) or not {"image", "label"} <= entry.keys():
                raise DataError(f"{path}: {what} is {entry!r}; needs image and label")
            images = entry["image"] if isinstance(entry["image"], list) else [entry["image"]]
            if len(images) == 1:
                images = _suffixed(path.parent, str(images[0]), len(channels))
            pairs.append(scan_of(path, list(map(str, images)), str(entry["label"]), reach, what))
            parts.append(split)
    named = distinct(path, pairs)
    if set(parts) == {"train"}:
        return named, {}
    return named, {pair.name: part for pair, part in zip(named, parts, strict=True)}


def _suffixed(folder: Path, image: str, channels: int) -> list[str]:
    """The files of an image: nnU-Net's first version lists them without their channels."""
    if (folder / image).exists():
        return [image]
    ending = next((e for e in NIFTI_ENDINGS[::-1] if image.endswith(e)), "")
    base = image.removesuffix(ending)
    found = [f"{base}_{channel:04}{ending}" for channel in range(max(1, channels))]
    return found if (folder / found[0]).exists() else [image]


def _cases(
    path: Path, content: Content, channels: tuple[str, ...], reach: Reach
) -> tuple[Pair, ...]:
    """nnU-Net's, listed or by the names in its folders."""
    if isinstance(listed := content.get("dataset"), dict):
        pairs = []
        for case, entry in listed.items():
            what = f"dataset[{case!r}]"
            if not isinstance(entry, dict) or not {"images", "label"} <= entry.keys():
                raise DataError(f"{path}: {what} is {entry!r}; needs images and label")
            pairs.append(scan_of(path, list(entry["images"]), str(entry["label"]), reach, what))
        return distinct(path, pairs)
    ending = str(content.get("file_ending", ".nii.gz"))
    if ending not in NIFTI_ENDINGS:
        raise DataError(
            f"{path}: its file_ending is {ending!r}; {' and '.join(NIFTI_ENDINGS)} are read"
        )
    folder = path.parent / "labelsTr"
    labels = sorted(p for p in folder.glob(f"*{ending}") if not p.name.startswith("."))
    count = max(1, len(channels))
    pairs = []
    for file in labels:
        case = stem(file)
        images = [f"imagesTr/{case}_{channel:04}{ending}" for channel in range(count)]
        pair = scan_of(path, images, f"labelsTr/{file.name}", reach, f"the case {case!r}")
        pairs.append(Pair(case, pair.image, pair.labels, channels=pair.channels))
    return tuple(pairs)
