"""Draws phantoms, abdomens of ellipsoids, and writes them as the NIfTI files of a hospital.

A body in air with a layer of fat; in it an organ (label 1) with lesions (label 2), and what may
be taken for them: bone, kidneys, a spleen, gut with air. Values are HU with a smooth bias and
noise. Field of view, number of slices, orientation, tilt and storage type differ from one to the
next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError
from hyperslab.formats import optional
from hyperslab.formats.files import ANY, make_folder, naming
from hyperslab.formats.nifti import image
from hyperslab.formats.nifti.image import NIFTI
from hyperslab.formats.nifti.source import Pair
from hyperslab.formats.targets import Floats

AIR = -1000.0
FAT = -100.0
TISSUE = 30.0
NOISE = 12.0
"""Gives the noise's standard deviation in every voxel [HU]."""

BEND = 8.0
"""Gives the standard deviation of the bias's coefficients [HU], at 200 mm from the centre."""


@dataclass(frozen=True, slots=True)
class Ellipsoid:
    """Describes points p [mm] with |rows · (p - centre)| <= 1: ``hu`` and label within."""

    centre: Floats
    rows: Floats  # (3, 3)
    hu: float
    label: int = 0

    @classmethod
    def of(
        cls, centre: Any, radii: Any, hu: float, label: int = 0, turn: Floats | None = None
    ) -> Ellipsoid:
        rotation = np.eye(3) if turn is None else turn
        return cls(
            np.asarray(centre, float), rotation / np.asarray(radii, float)[:, None], hu, label
        )

    def at(self, share: Floats) -> Floats:
        """Returns the point at a place (3,) of the unit ball."""
        return self.centre + np.linalg.solve(self.rows, share)

    def inside(self, plane: Floats) -> NDArray[np.bool_]:
        """Tells which points (X, Y, 3) lie within."""
        return (((plane - self.centre) @ self.rows.T) ** 2).sum(-1) <= 1


def draw_phantom(
    rng: np.random.Generator, slices: int, width: int
) -> tuple[NDArray[np.int16], NDArray[np.uint8], Floats]:
    """Draws a phantom (X, Y, Z) in RAS+: values [HU], classes and the affine."""
    columns = max(4, round(rng.uniform(0.9, 1.2) * width))
    planes = max(4, round(rng.uniform(0.5, 1.2) * slices))
    shape = (columns, columns, planes)
    spacing = np.array([rng.uniform(350, 410) / columns] * 2 + [rng.uniform(240, 300) / planes])
    affine = np.eye(4)
    tilt = np.radians(rng.choice([0.0, rng.uniform(-8, 8)]))  # of the gantry, about x
    cos, sin = np.cos(tilt), np.sin(tilt)
    affine[:3, :3] = np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]]) * spacing
    affine[:3, 3] = -affine[:3, :3] @ ((np.array(shape) - 1) / 2)
    body = _anatomy(rng)
    bend = rng.normal(0, BEND, (3, 3))
    hu = np.empty(shape, np.int16)
    classes = np.empty(shape, np.uint8)
    plane = np.moveaxis(np.indices((columns, columns, 1)), 0, -1)[:, :, 0]
    for k in range(planes):  # plane by plane: the points of all of them are many
        points = (plane + np.array([0, 0, k])) @ affine[:3, :3].T + affine[:3, 3]
        values, classes[:, :, k] = _paint(points, body)
        unit = points / 200
        values += np.einsum("xyi,ij,xyj->xy", unit, bend, unit) * (values > AIR)
        values += rng.normal(0, NOISE, values.shape)
        hu[:, :, k] = np.rint(values).clip(-1024, 3000)
    return hu, classes, affine


def _paint(points: Floats, body: list[Ellipsoid]) -> tuple[Floats, NDArray[np.uint8]]:
    """Paints values and classes at points (X, Y, 3): skin, wall, later organs on top."""
    values = np.full(points.shape[:2], AIR)
    classes = np.zeros(points.shape[:2], np.uint8)
    skin, wall, *organs = body
    values[skin.inside(points)] = skin.hu
    within = wall.inside(points)
    values[within] = wall.hu
    for ellipsoid in organs:
        inside = within & ellipsoid.inside(points)
        values[inside] = ellipsoid.hu
        classes[inside] = ellipsoid.label
    return values, classes


def _anatomy(rng: np.random.Generator) -> list[Ellipsoid]:
    """Lists the organs from the outside in; x [mm] to the right, y forwards, z upwards."""
    size = np.array([165.0, 115.0, 900.0]) * rng.uniform(0.9, 1.1, 3)
    body = [
        Ellipsoid.of((0, 0, 0), size, FAT),
        Ellipsoid.of((0, 0, 0), size - np.array([15.0, 15.0, 0.0]), TISSUE),
        Ellipsoid.of((0, -70, 0), rng.uniform((15, 15, 800), (22, 22, 900)), rng.uniform(350, 600)),
    ]
    for side in (-1, 1):
        place = np.array([side * 55, -50, rng.uniform(-70, -30)])
        body.append(_turned_ellipsoid(rng, place, (22, 24, 45), rng.uniform(170, 220)))
    body.append(_turned_ellipsoid(rng, (-95, -15, 20), (24, 32, 48), rng.uniform(50, 70)))
    for _ in range(3):
        place = rng.uniform((-80, 20, -110), (10, 60, -40))
        body.append(_turned_ellipsoid(rng, place, (14, 14, 22), rng.choice([-700.0, 10.0])))
    radii = rng.uniform((65, 55, 65), (90, 75, 95))
    place = rng.uniform((35, -10, -10), (60, 15, 30))
    organ = Ellipsoid.of(place, radii, rng.uniform(100, 130), 1, _rotation(rng, 25))
    return [*body, organ, *(_lesion(rng, organ) for _ in range(rng.integers(1, 5)))]


def _lesion(rng: np.random.Generator, organ: Ellipsoid) -> Ellipsoid:
    direction = rng.normal(size=3)
    share = direction / np.linalg.norm(direction) * rng.uniform(0, 0.6)
    radii = rng.uniform(10, 25) * rng.uniform(0.8, 1.2, 3)
    return Ellipsoid.of(organ.at(share), radii, rng.uniform(40, 65), 2, _rotation(rng, 180))


def _turned_ellipsoid(rng: np.random.Generator, centre: Any, radii: Any, hu: float) -> Ellipsoid:
    return Ellipsoid.of(
        centre, np.asarray(radii) * rng.uniform(0.8, 1.2, 3), hu, turn=_rotation(rng, 30)
    )


def _rotation(rng: np.random.Generator, degrees: float) -> Floats:
    """Turns by up to so many degrees about a random axis (Rodrigues' formula)."""
    x, y, z = (axis := rng.normal(size=3)) / np.linalg.norm(axis)
    angle = np.radians(rng.uniform(-degrees, degrees))
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


AXIS_LETTERS = ("RL", "AP", "SI")


def make_phantoms(
    folder: Path,
    count: int,
    *,
    slices: int,
    width: int,
    seed: int = 0,
    done: Callable[[Pair], None] = lambda pair: None,
) -> list[Pair]:
    """Writes phantoms 0 .. count-1 as ``volume-N`` and ``segmentation-N`` into ``folder``.

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
    make_folder(folder)
    pairs = []
    for index in range(count):
        suffix = image.NIFTI_SUFFIXES[index % 4 == 3]  # compressing takes longest
        pair = Pair(
            f"volume-{index}",
            folder / f"volume-{index}{suffix}",
            folder / f"segmentation-{index}{suffix}",
        )
        words = f"hyperslab phantom {index}, seed {seed}, {slices} x {width}"
        if not (_is_there(pair.image, words) and _is_there(pair.labels, words)):
            _write_phantom(pair, words, np.random.default_rng([seed, index]), slices, width)
        pairs.append(pair)
        done(pair)
    return pairs


def _is_there(path: Path, words: str) -> bool:
    """Tells if the phantom is there; refuses something else."""
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


def _write_phantom(
    pair: Pair, words: str, rng: np.random.Generator, slices: int, width: int
) -> None:
    """Writes one phantom: drawn in RAS+, then stored with its axes as they happen to be."""
    nibabel = optional.nibabel()
    hu, classes, affine = draw_phantom(rng, slices, width)
    header = nibabel.Nifti1Header()
    header["descrip"] = words
    header.set_xyzt_units("mm")
    unsigned = bool(rng.integers(2))
    if unsigned:
        header.set_slope_inter(1, -1024)
    # Axes mostly as scanners store them, planes last; sometimes any of the 48 ways.
    axes = [AXIS_LETTERS[a] for a in (rng.permutation(3) if rng.random() < 0.25 else (0, 1, 2))]
    codes = "".join(letters[rng.integers(2)] for letters in axes)
    order = nibabel.orientations.axcodes2ornt(codes)
    ornt = nibabel.orientations.ornt_transform(image.CANONICAL, order)
    affine = affine @ nibabel.orientations.inv_ornt_aff(ornt, hu.shape)
    hu, classes = (nibabel.orientations.apply_orientation(a, ornt) for a in (hu, classes))
    stored = np.dtype(np.uint16 if unsigned else np.int16)
    image.save_image(pair.image, hu, stored, affine, header)
    header.set_slope_inter(1, 0)
    image.save_image(pair.labels, classes, np.dtype(np.uint8), affine, header)
