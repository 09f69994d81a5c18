"""Phantoms written as the NIfTI files that a hospital might send.

Field of view, number of slices, orientation, tilt and storage type differ from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hyperslab.ct import anatomy, scan_file
from hyperslab.errors import DataError
from hyperslab.formats.nifti import image
from hyperslab.formats.nifti.dataset_json import write_dataset_json
from hyperslab.formats.nifti.header import NIFTI
from hyperslab.formats.nifti.pairs import Pair
from hyperslab.formats.shared import optional
from hyperslab.formats.shared.checks import ANY, naming
from hyperslab.formats.shared.labels import LIVER

LETTERS = ("RL", "AP", "SI")


def make_phantoms(
    folder: Path,
    count: int,
    *,
    slices: int,
    width: int,
    seed: int = 0,
    done: Callable[[Pair], None] = lambda pair: None,
) -> list[Pair]:
    """Write phantoms 0 .. count-1 as ``volume-N`` and ``segmentation-N`` into ``folder``.

    They have about ``width`` voxels in a plane and 0.5 to 1.2 times ``slices`` planes. Phantom N
    depends on ``seed``, N and these two. Those that are there are kept; ``done`` is called for
    each. Returns all of them.

    Raises:
        DataError: if an argument is out of range, a file there is of other arguments, or one
            cannot be written.
        HyperslabError: if the extra ``medical`` is not installed.
    """
    if count < 1 or slices < 4 or width < 4 or seed < 0:
        raise DataError(
            f"{count} phantoms of {slices} x {width} x {width} voxels, seed {seed}: need at least "
            "1 phantom, 4 voxels along each dim, and no negative seed"
        )
    scan_file.make_folder(folder)
    pairs = []
    for index in range(count):
        suffix = image.NIFTI_SUFFIXES[index % 4 == 3]  # compressing takes longest
        pair = Pair(
            f"volume-{index}",
            folder / f"volume-{index}{suffix}",
            folder / f"segmentation-{index}{suffix}",
        )
        words = f"hyperslab phantom {index}, seed {seed}, {slices} x {width}"
        if not (_is(pair.image, words) and _is(pair.labels, words)):
            _write(pair, words, np.random.default_rng([seed, index]), slices, width)
        pairs.append(pair)
        done(pair)
    return pairs


def list_phantoms(path: Path, pairs: Sequence[Pair]) -> None:
    """Write their `dataset.json` to ``path``, as the Medical Segmentation Decathlon has it.

    Raises:
        DataError: it cannot be written.
    """
    write_dataset_json(path, pairs, LIVER, ("CT",))


def _is(path: Path, words: str) -> bool:
    """Whether the phantom is there.

    Raises:
        DataError: something else is.
    """
    if not path.exists():
        return False
    with naming(path, NIFTI, ANY):
        found = bytes(optional.nibabel().load(path).header["descrip"]).rstrip(b"\0")
    if found != words.encode():
        raise DataError(
            f"{path} is {found.decode('ascii', 'replace')!r}, not {words!r}: "
            "delete it or take another folder"
        )
    return True


def _write(pair: Pair, words: str, rng: np.random.Generator, slices: int, width: int) -> None:
    """One phantom: drawn in RAS+, then stored with its axes as they happen to be."""
    nibabel = optional.nibabel()
    hu, classes, affine = anatomy.draw(rng, slices, width)
    header = nibabel.Nifti1Header()
    header["descrip"] = words
    header.set_xyzt_units("mm")
    unsigned = bool(rng.integers(2))
    if unsigned:
        header.set_slope_inter(1, -1024)
    order = nibabel.orientations.axcodes2ornt(_orientation(rng))
    ornt = nibabel.orientations.ornt_transform(image.CANONICAL, order)
    affine = affine @ nibabel.orientations.inv_ornt_aff(ornt, hu.shape)
    hu, classes = (nibabel.orientations.apply_orientation(a, ornt) for a in (hu, classes))
    stored = np.dtype(np.uint16 if unsigned else np.int16)
    image.save_image(pair.image, hu, stored, affine, header)
    header.set_slope_inter(1, 0)
    image.save_image(pair.labels, classes, np.dtype(np.uint8), affine, header)


def _orientation(rng: np.random.Generator) -> str:
    """Mostly as scanners store it, planes last; sometimes any of the 48."""
    axes = [LETTERS[a] for a in (rng.permutation(3) if rng.random() < 0.25 else (0, 1, 2))]
    return "".join(letters[rng.integers(2)] for letters in axes)
