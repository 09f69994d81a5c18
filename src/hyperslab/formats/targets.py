"""Describes targets: numbers with their names and physical units, or a class for every voxel.

`Parameters` leads from the range [-1, 1] that a network is shown back to physical units.

Files with classes have the keys of LBANN's LiTS files: ``volume`` is (C, D, H, W);
``segmentation`` has the same voxels and 1 or C channels, which are then equal, of any type that
holds whole numbers. The names of the classes are the attribute ``classes`` of the file; where it
is missing they are LiTS's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError

Floats = NDArray[np.float64]

COSMOFLOW_NAMES = ("Omega_m", "sigma_8", "n_s", "H_0")
"""In the order of ``unitPar`` in the public files."""


def numbered_names(count: int) -> tuple[str, ...]:
    """Returns the names of parameters that have none: ``y0``, ``y1``, ..."""
    return tuple(f"y{i}" for i in range(count))


def universe_names(count: int) -> tuple[str, ...]:
    """Returns the documented names, where the parameters are as many."""
    return COSMOFLOW_NAMES if count == len(COSMOFLOW_NAMES) else numbered_names(count)


def as_numbers(found: Any, where: str) -> Floats:
    """Returns finite numbers as float64; refuses anything else, or none, by where they are."""
    values = np.asarray(found)
    if values.dtype.kind not in "fiu" or values.size == 0:
        raise DataError(f"{where} is {values.dtype} {values.shape}; needs numbers")
    if not np.isfinite(values).all():
        raise DataError(f"{where} holds {values.ravel()[:8].tolist()}; needs finite numbers")
    return values.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Parameters:
    """P targets; ``physical = centre + scale * unit``, where unit is what the network is shown.

    ``misfit`` is the largest deviation of the files' physical values from that line, as a share
    of the values' range: 0 where the line is exact.
    """

    names: tuple[str, ...]
    centre: tuple[float, ...]
    scale: tuple[float, ...]
    misfit: float = 0.0

    @classmethod
    def normalised(cls, names: Sequence[str]) -> Parameters:
        """Takes the targets themselves for physical values, as none are known."""
        return cls(tuple(names), (0.0,) * len(names), (1.0,) * len(names))

    @classmethod
    def of_ranges(cls, ranges: Mapping[str, tuple[float, float]]) -> Parameters:
        """Makes parameters that are shown from -1 to 1 within ``ranges``, by name."""
        ends = np.array(list(ranges.values())).reshape(-1, 2)
        centre, scale = (ends[:, 0] + ends[:, 1]) / 2, (ends[:, 1] - ends[:, 0]) / 2
        return cls(tuple(ranges), tuple(centre.tolist()), tuple(scale.tolist()))

    @classmethod
    def within(
        cls, ranges: Mapping[str, tuple[float, float]], unit: Floats, physical: Floats
    ) -> Parameters:
        """Makes parameters drawn within ``ranges``, by name; both (N, P) show how exact that is."""
        found = cls.of_ranges(ranges)
        size = np.abs(list(ranges.values())).max(1).clip(np.finfo(float).tiny)
        line = np.array(found.scale) * unit
        off = float((np.abs(physical - found.centre - line) / size).max())
        return replace(found, misfit=off)

    @classmethod
    def fit(cls, names: Sequence[str], unit: Floats, physical: Floats) -> Parameters:
        """Fits a line through (unit, physical), both (N, P), for each parameter of a catalogue.

        The range of a production run is not published, so it is found and never assumed. A
        parameter that does not vary is given its constant value: scale 0.
        """
        lines = [_fit_line(u, p) for u, p in zip(unit.T, physical.T, strict=True)]
        centre, scale, misfit = zip(*lines, strict=True)
        return cls(tuple(names), centre, scale, max(misfit))

    def only(self, indices: Sequence[int]) -> Parameters:
        """Returns the parameters at ``indices``, in this order."""
        return Parameters(
            tuple(self.names[i] for i in indices),
            tuple(self.centre[i] for i in indices),
            tuple(self.scale[i] for i in indices),
            self.misfit,
        )

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Returns the physical values at unit = -1 and +1, by name."""
        return {
            name: (centre - scale, centre + scale)
            for name, centre, scale in zip(self.names, self.centre, self.scale, strict=True)
        }

    def physical(self, unit: NDArray[np.floating]) -> Floats:
        """Returns normalised values (..., P) in each parameter's own unit.

        >>> Parameters(("a", "b"), (0.3, 70.0), (0.03, 7.0)).physical(np.array([-1.0, 0.5]))
        array([ 0.27, 73.5 ])
        """
        return np.asarray(self.centre) + np.asarray(self.scale) * unit

    def physical_covariance(self, unit: Floats | None) -> Floats | None:
        """Returns covariances (..., P, P), if there are any, in the parameters' own units."""
        return None if unit is None else unit * np.outer(self.scale, self.scale)


def range_words(ranges: Mapping[str, tuple[float, float]]) -> str:
    """Writes ranges in one line.

    >>> range_words({"Omega_m": (0.25, 0.35), "H_0": (70.0, 70.0)})
    'Omega_m=0.25..0.35,H_0=70..70'
    """
    return ",".join(f"{name}={lo:.12g}..{hi:.12g}" for name, (lo, hi) in ranges.items())


def ranges_in(words: str) -> dict[str, tuple[float, float]]:
    """Parses what `range_words` has written; nothing, if it was not that.

    >>> ranges_in("Omega_m=0.25..0.35,H_0=70..70")
    {'Omega_m': (0.25, 0.35), 'H_0': (70.0, 70.0)}
    >>> ranges_in("large")
    {}
    """
    found = {}
    for word in words.split(","):
        name, _, bounds = word.partition("=")
        try:
            lo, hi = (float(bound) for bound in bounds.split(".."))
        except ValueError:
            return {}
        if not (math.isfinite(lo) and math.isfinite(hi)) or lo > hi:
            return {}
        found[name] = (lo, hi)
    return found


def _fit_line(unit: Floats, physical: Floats) -> tuple[float, float, float]:
    """Fits by least squares: returns centre, scale and largest relative deviation."""
    u = unit - unit.mean()
    p = physical - physical.mean()
    scale = float(u @ p / (u @ u)) if np.ptp(unit) > 0 else 0.0
    off = float(np.abs(p - scale * u).max())
    spread = float(np.ptp(physical))
    return float(physical.mean() - scale * unit.mean()), scale, off / spread if spread else 0.0


SCAN_KEYS = ("volume", "segmentation")
LIVER = ("background", "liver", "tumour")
MOST_CLASSES = 256
"""Classes that uint8 can tell apart."""


def check_class_names(names: Sequence[str], what: str) -> None:
    """Refuses names of classes, ``what``, that are too few, too many, empty or twice the same."""
    if not 2 <= len(names) <= MOST_CLASSES or len({*names, ""}) != len(names) + 1:
        raise DataError(
            f"{what} are {', '.join(names) or 'missing'}; needs 2 to {MOST_CLASSES} different "
            "ones, the background's first"
        )


def as_classes(stored: NDArray[Any], where: str) -> NDArray[np.uint8]:
    """Returns a file's labels (1 or C, d, h, w), whole numbers to 255, as classes (d, h, w)."""
    labels = stored[0]
    with np.errstate(invalid="ignore"):
        whole = labels.astype(np.uint8)
    wrong = labels[whole != labels]
    if wrong.size:
        raise DataError(f"{where} holds labels that are not classes, such as {wrong[0]}")
    if (stored[1:] != labels).any():
        raise DataError(f"{where}: the channels of labels are not equal")
    return whole


def check_classes(labels: NDArray[Any], classes: tuple[str, ...], where: str) -> None:
    """Refuses labels without a class, or of another type than uint8, before they reach a loss."""
    if labels.dtype != np.uint8:
        raise DataError(f"{where}: labels are {labels.dtype}, not uint8")
    if labels.size and labels.max() >= len(classes):
        raise DataError(
            f"{where} holds label {labels.max()} but there are {len(classes)} classes: "
            f"{', '.join(classes)}"
        )
