"""The anatomy of a phantom: an abdomen of ellipsoids.

A body in air with a layer of fat; in it an organ (label 1) with lesions (label 2), and what may be
taken for them: bone, kidneys, a spleen, gut with air. Values are HU with a smooth bias and noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.formats.parameters import Floats

AIR = -1000.0
FAT = -100.0
TISSUE = 30.0
NOISE = 12.0
"""Standard deviation of every voxel [HU]."""

BEND = 8.0
"""Standard deviation of the bias's coefficients [HU], at 200 mm from the centre."""


@dataclass(frozen=True, slots=True)
class Ellipsoid:
    """Points p [mm] with |rows · (p - centre)| <= 1; ``hu`` within; label of those voxels."""

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
        """The point at a place (3,) of the unit ball."""
        return self.centre + np.linalg.solve(self.rows, share)

    def inside(self, plane: Floats) -> NDArray[np.bool_]:
        """Which points (X, Y, 3) lie within."""
        return (((plane - self.centre) @ self.rows.T) ** 2).sum(-1) <= 1


def draw(
    rng: np.random.Generator, slices: int, width: int
) -> tuple[NDArray[np.int16], NDArray[np.uint8], Floats]:
    """A phantom (X, Y, Z) in RAS+: values [HU], classes and the affine."""
    columns = max(4, round(rng.uniform(0.9, 1.2) * width))
    planes = max(4, round(rng.uniform(0.5, 1.2) * slices))
    shape = (columns, columns, planes)
    spacing = np.array([rng.uniform(350, 410) / columns] * 2 + [rng.uniform(240, 300) / planes])
    affine = np.eye(4)
    affine[:3, :3] = _about_x(rng.choice([0.0, rng.uniform(-8, 8)])) * spacing
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
    """Values and classes at points (X, Y, 3): skin, wall, and within it the later ones on top."""
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
    """From the outside in; x [mm] to the right, y forwards, z upwards."""
    size = np.array([165.0, 115.0, 900.0]) * rng.uniform(0.9, 1.1, 3)
    body = [
        Ellipsoid.of((0, 0, 0), size, FAT),
        Ellipsoid.of((0, 0, 0), size - np.array([15.0, 15.0, 0.0]), TISSUE),
        Ellipsoid.of((0, -70, 0), rng.uniform((15, 15, 800), (22, 22, 900)), rng.uniform(350, 600)),
    ]
    for side in (-1, 1):
        place = np.array([side * 55, -50, rng.uniform(-70, -30)])
        body.append(_turned(rng, place, (22, 24, 45), rng.uniform(170, 220)))
    body.append(_turned(rng, (-95, -15, 20), (24, 32, 48), rng.uniform(50, 70)))
    for _ in range(3):
        place = rng.uniform((-80, 20, -110), (10, 60, -40))
        body.append(_turned(rng, place, (14, 14, 22), rng.choice([-700.0, 10.0])))
    radii = rng.uniform((65, 55, 65), (90, 75, 95))
    place = rng.uniform((35, -10, -10), (60, 15, 30))
    organ = Ellipsoid.of(place, radii, rng.uniform(100, 130), 1, _rotation(rng, 25))
    return [*body, organ, *(_lesion(rng, organ) for _ in range(rng.integers(1, 5)))]


def _lesion(rng: np.random.Generator, organ: Ellipsoid) -> Ellipsoid:
    direction = rng.normal(size=3)
    share = direction / np.linalg.norm(direction) * rng.uniform(0, 0.6)
    radii = rng.uniform(10, 25) * rng.uniform(0.8, 1.2, 3)
    return Ellipsoid.of(organ.at(share), radii, rng.uniform(40, 65), 2, _rotation(rng, 180))


def _turned(rng: np.random.Generator, centre: Any, radii: Any, hu: float) -> Ellipsoid:
    return Ellipsoid.of(
        centre, np.asarray(radii) * rng.uniform(0.8, 1.2, 3), hu, turn=_rotation(rng, 30)
    )


def _rotation(rng: np.random.Generator, degrees: float) -> Floats:
    """By up to so many degrees about a random axis (Rodrigues' formula)."""
    x, y, z = (axis := rng.normal(size=3)) / np.linalg.norm(axis)
    angle = np.radians(rng.uniform(-degrees, degrees))
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


def _about_x(degrees: float) -> Floats:
    """A tilted gantry."""
    c = np.cos(np.radians(degrees))
    s = np.sin(np.radians(degrees))
    return np.array([[1, 0, 0], [0, c, -s], [0, s, c]])
