"""The four cosmological parameters, their ranges, and the draw of one universe."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, drawn evenly from ``fiducial`` ± ``half_width``.

    >>> PARAMETERS[0].physical(-0.5)
    0.27
    """

    name: str
    fiducial: float
    half_width: float

    def physical(self, unit: float) -> float:
        """The value at the position ``unit`` in [-1, 1] of the range."""
        return self.fiducial + self.half_width * unit


PARAMETERS = (
    Parameter("Omega_m", 0.30, 0.06),
    Parameter("sigma_8", 0.80, 0.16),
    Parameter("n_s", 0.96, 0.06),
    Parameter("H_0", 70.0, 7.0),  # [km/s/Mpc]
)
"""In the order of ``unitPar``. The centres are the published generator's; the widths are wider than
its ±10 % for Omega_m and sigma_8, which a small universe tells, and narrower for n_s."""

FIDUCIAL_H_0 = 70.0
"""[km/s/Mpc]: sides of universes are given for it."""

OMEGA_B = 0.05
"""Baryons, in the initial power spectrum only; kept at this value as Omega_m varies."""

NAMES = tuple(p.name for p in PARAMETERS)


@dataclass(frozen=True, slots=True)
class Draw:
    """What is random in one universe: ``unit`` and ``physical`` (4,), ``noise`` (2,) uint32."""

    unit: NDArray[np.float64]
    physical: NDArray[np.float64]
    noise: NDArray[np.uint32]


def draw_universe(
    seed: int,
    index: int,
    varying: Iterable[str] = NAMES,
    parameters: Sequence[Parameter] = PARAMETERS,
) -> Draw:
    """Universe ``index`` of ``seed``, with its four ``parameters`` within their ranges.

    Those not in ``varying``, or with a range of no width, stay at the fiducial. It depends on
    nothing else. All four numbers are drawn in any case, so that a universe keeps its sigma_8 and
    its initial noise whatever else varies, and its place within whatever ranges.
    """
    names = frozenset(varying)
    sequence = np.random.SeedSequence([seed, index])
    noise = sequence.generate_state(2).astype(np.uint32)
    unit = np.random.default_rng(sequence).uniform(-1.0, 1.0, len(PARAMETERS))
    unit = np.where([p.name in names and p.half_width > 0 for p in parameters], unit, 0.0)
    physical = [p.physical(u) for p, u in zip(parameters, unit, strict=True)]
    return Draw(unit, np.array(physical), noise)


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names in the order of ``unitPar``, each once.

    Raises:
        DataError: for an unknown name, with the nearest known one; for no name at all.
    """
    asked = tuple(names)
    for name in asked:
        if name not in NAMES:
            raise DataError(
                f"unknown parameter {name!r}{_nearest(name)}; known: {', '.join(NAMES)}"
            )
    if not asked:
        raise DataError(f"no parameter varies: name at least one of {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name in asked)


def _nearest(name: str) -> str:
    lower = {known.lower(): known for known in NAMES}
    close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.3)
    return f"; did you mean {lower[close[0]]!r}?" if close else ""
