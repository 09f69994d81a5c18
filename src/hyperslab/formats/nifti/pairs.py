"""Which files of a folder are a volume and its labels, by their names.

LiTS: ``volume-N.nii`` and ``segmentation-N.nii``, in one folder or in several; a
``test-volume-N.nii`` has no labels. Medical Segmentation Decathlon: ``imagesTr/liver_N.nii.gz`` and
the same name in ``labelsTr``; ``imagesTs`` has no labels. Either may end in .nii or .nii.gz.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from hyperslab.errors import DataError

Key = tuple[str, int]

NAME = re.compile(
    r"(test-volume|volume|segmentation)-(\d+)\.nii(?:\.gz)?|liver_(\d+)\.nii(?:\.gz)?"
)

MSD_ROLES = {"imagesTr": "image", "labelsTr": "labels", "imagesTs": "test"}
LITS_ROLES = {"volume": "image", "segmentation": "labels", "test-volume": "test"}


@dataclass(frozen=True, slots=True)
class Pair:
    """One volume with its labels, or the ``problem`` why there is none.

    ``test``: it was published without labels. ``channels``: the files of the channels after the
    first, where each has its own.
    """

    name: str
    image: Path
    labels: Path
    problem: str = ""
    test: bool = False
    channels: tuple[Path, ...] = ()

    @property
    def images(self) -> tuple[Path, ...]:
        """The files of all channels."""
        return self.image, *self.channels


def find(folder: Path) -> list[Pair]:
    """The pairs in a folder and its sub-folders, by number; hidden files are left out.

    Raises:
        DataError: the folder is missing or holds no file of these names.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: is no folder; give the one that holds the NIfTI files")
    found: dict[Key, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.rglob("*.nii*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        role = None if hidden or path.is_dir() else _role(path)
        if role is not None:
            key, kind = role
            found[key][kind].append(path)
    if not found:
        raise DataError(
            f"{folder}: no volume-N.nii[.gz] or imagesTr/liver_N.nii[.gz] in it or below"
        )
    return [_pair(found[key]) for key in sorted(found)]


def stem(path: Path) -> str:
    """The name without .nii or .nii.gz."""
    return path.name.removesuffix(".gz").removesuffix(".nii")


def _role(path: Path) -> tuple[Key, str] | None:
    match = NAME.fullmatch(path.name)
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
            return Pair(stem(one), one, one, f"there are {names}; keep one of them")
    if files["test"]:
        return Pair(stem(one), one, one, f"{one}: a test volume, published without labels", True)
    if not images:
        return Pair(stem(one), one, one, f"{one}: labels without a volume")
    if not labels:
        return Pair(stem(one), one, one, f"{one}: has no labels")
    return Pair(stem(one), one, labels[0])
