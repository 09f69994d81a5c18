"""Draws the four cosmological parameters of a universe from their ranges.

Three sets of ranges have names, and any others can be given. `UniverseSettings` are all that the
universes of a folder share.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hyperslab.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Attributes = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Declares one parameter, drawn evenly from ``fiducial`` ± ``half_width``.

    >>> PARAMETERS[0].physical(-0.5)
    0.27
    """

    name: str
    fiducial: float
    half_width: float

    def physical(self, unit: float) -> float:
        """Computes the value at the position ``unit`` in [-1, 1] of the range."""
        return self.fiducial + self.half_width * unit

    @property
    def range(self) -> tuple[float, float]:
        """Returns the lowest and the highest value."""
        return self.physical(-1.0), self.physical(1.0)


PARAMETERS = (
    Parameter("Omega_m", 0.30, 0.06),
    Parameter("sigma_8", 0.80, 0.16),
    Parameter("n_s", 0.96, 0.06),
    Parameter("H_0", 70.0, 7.0),  # [km/s/Mpc]
)
"""Orders the parameters as ``unitPar`` does.

The centres are the published generator's; the widths are wider than its ±10 % for Omega_m and
sigma_8, which a small universe tells, and narrower for n_s."""

FIDUCIAL_H_0 = 70.0
"""Gives the H_0 [km/s/Mpc] for which sides of universes are given."""

OMEGA_B = 0.05
"""Fixes the baryons in the initial power spectrum, also as Omega_m varies."""

NAMES = tuple(p.name for p in PARAMETERS)


@dataclass(frozen=True, slots=True)
class Draw:
    """Holds what is random in a universe: ``unit``, ``physical`` (4,), ``noise`` (2,) uint32."""

    unit: NDArray[np.float64]
    physical: NDArray[np.float64]
    noise: NDArray[np.uint32]


def draw_universe(
    seed: int,
    index: int,
    varying: Iterable[str] = NAMES,
    parameters: Sequence[Parameter] = PARAMETERS,
) -> Draw:
    """Draws universe ``index`` of ``seed``, its four ``parameters`` within their ranges.

    Those not in ``varying``, or with a range of no width, stay at the fiducial. It depends on
    nothing else. All four numbers are drawn in any case, so that a universe keeps its sigma_8 and
    its initial noise whatever else varies, and its place within whatever ranges.
    """
    import numpy as np

    names = frozenset(varying)
    sequence = np.random.SeedSequence([seed, index])
    noise = sequence.generate_state(2).astype(np.uint32)
    unit = np.random.default_rng(sequence).uniform(-1.0, 1.0, len(PARAMETERS))
    unit = np.where([p.name in names and p.half_width > 0 for p in parameters], unit, 0.0)
    physical = [p.physical(u) for p, u in zip(parameters, unit, strict=True)]
    return Draw(unit, np.array(physical), noise)


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """Checks names, and returns them in the order of ``unitPar``, each once.

    No name, or an unknown one, is refused, with the nearest known one.
    """
    asked = tuple(names)
    for name in asked:
        if name not in NAMES:
            lower = {known.lower(): known for known in NAMES}
            close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.3)
            nearest = f"; did you mean {lower[close[0]]!r}?" if close else ""
            raise DataError(f"unknown parameter {name!r}{nearest}; known: {', '.join(NAMES)}")
    if not asked:
        raise DataError(f"no parameter varies: name at least one of {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name in asked)


RANGES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "wide": {p.name: p.range for p in PARAMETERS},
    "public": {p.name: (0.9 * p.fiducial, 1.1 * p.fiducial) for p in PARAMETERS},
    "sc18": {
        "Omega_m": (0.25, 0.35),
        "sigma_8": (0.78, 0.95),
        "n_s": (0.9, 1.0),
        "H_0": (70.0, 70.0),
    },
}
"""Names sets of ranges.

Wide: ours, which small universes tell apart. Public: the published generator's ±10 %. SC18:
Mathuriya et al. 2018, section IV-C, where H_0 does not vary; its value is not stated."""


def parameters_in(words: str) -> tuple[Parameter, ...]:
    """Chooses the four parameters with the ranges that some words name, with commas.

    A word is one of `RANGES`, the first one only, or NAME=lo..hi; what is not named is as in
    ``wide``. A range of no width is a constant.

    >>> [p.fiducial for p in parameters_in("sc18,H_0=60..70")]
    [0.3, 0.865, 0.95, 65.0]

    Raises:
        DataError: a name is unknown or comes twice, a bound is not a number, the lower one is the
            higher, or the parameters are none of a universe.
    """
    found = {p.name: p for p in PARAMETERS}
    said: set[str] = set()
    for number, word in enumerate(part.strip() for part in words.split(",")):
        name, equals, bounds = word.partition("=")
        if not equals and number == 0 and word in RANGES:
            found = {n: _between(n, lo, hi) for n, (lo, hi) in RANGES[word].items()}
            continue
        if not equals:
            first = "" if number == 0 or word not in RANGES else f"; {word!r} can only come first"
            raise DataError(
                f"ranges {words!r}: {word!r} is neither {', '.join(RANGES)} nor NAME=lo..hi, such "
                f"as sigma_8=0.7..0.9{first}"
            )
        (known,) = check_names([name.strip()])
        if known in said:
            raise DataError(f"ranges {words!r}: {known} comes twice")
        said.add(known)
        try:
            lo, hi = (float(bound) for bound in bounds.split(".."))
        except ValueError:
            raise DataError(
                f"ranges {words!r}: {word!r} needs two numbers, such as sigma_8=0.7..0.9"
            ) from None
        if not (math.isfinite(lo) and math.isfinite(hi)) or lo > hi:
            raise DataError(f"ranges {words!r}: {word!r} does not go from a number to a larger one")
        found[known] = _between(known, lo, hi)
    return tuple(_possible(found[name]) for name in NAMES)


def words_of_ranges(parameters: Sequence[Parameter]) -> str:
    """Writes all ranges as they are kept in a file."""
    from hyperslab.formats.targets import range_words

    return range_words({p.name: p.range for p in parameters})


def _between(name: str, lo: float, hi: float) -> Parameter:
    return Parameter(name, round((lo + hi) / 2, 12), round((hi - lo) / 2, 12))


def _possible(parameter: Parameter) -> Parameter:
    """Checks a parameter: a range that no universe can have is refused before hours of work."""
    least = {"Omega_m": OMEGA_B, "sigma_8": 0.0, "H_0": 0.0}.get(parameter.name, -math.inf)
    most = {"Omega_m": 1.0}.get(parameter.name, math.inf)
    lo, hi = parameter.range
    if lo <= least or hi > most:
        words = f"above {least:g}" + (f" and at most {most:g}" if most < math.inf else "")
        raise DataError(f"{parameter.name} from {lo:g} to {hi:g}: it has to be {words}")
    return parameter


VOXEL_SIDE = 2.0
"""Gives the default side of a voxel [Mpc/h]: small universes tell most about sigma_8 there."""


LEAST_BOX, LARGEST_BOX = 1e-3, 1e6
"""Limits sides [Mpc/h]: far beyond them the initial power spectrum overflows."""


@dataclass(frozen=True, slots=True)
class UniverseSettings:
    """Holds what all universes of a folder share; what is out of range is refused."""

    size: int  # voxels per side
    box_size: float  # [Mpc/h] at H_0 = 70
    seed: int
    parameters: tuple[str, ...]  # the names of those that vary
    particles: int  # per side
    steps: int  # of the particle mesh
    ranges: str = "wide"  # see `parameters_in`

    def __post_init__(self) -> None:
        _at_least("size", self.size, 1)
        _at_least("seed", self.seed, 0)
        if self.seed >= 2**63:
            raise DataError(f"seed must be less than 2^63, not {self.seed}")
        _at_least("particles", self.particles, 2)
        _at_least("steps", self.steps, 1)
        if not LEAST_BOX <= self.box_size <= LARGEST_BOX:
            raise DataError(
                f"box size must be a length in Mpc/h from {LEAST_BOX:g} to {LARGEST_BOX:g}, not "
                f"{self.box_size}"
            )
        object.__setattr__(self, "parameters", check_names(self.parameters))
        parameters_in(self.ranges)

    def side(self, h_0: float) -> float:
        """Computes the side [Mpc/h] of a universe: all are alike in Mpc, so it grows with H_0."""
        return self.box_size * h_0 / FIDUCIAL_H_0

    def attributes(self, index: int) -> Attributes:
        """Lists all that universe ``index`` is made from, as it is kept in its file."""
        words = {
            "parameters": ",".join(self.parameters),
            "ranges": words_of_ranges(parameters_in(self.ranges)),
        }
        return {**asdict(self), **words, "index": index, "method": METHOD}


METHOD = "3: torch, slopes by differences, noise of numpy"
"""Tells universes of a seed from those that an earlier version made of it."""


def settings_of(
    *,
    count: int,
    size: int,
    box_size: float | None,
    seed: int,
    parameters: Iterable[str],
    particles: int | None,
    steps: int,
    ranges: str,
) -> UniverseSettings:
    """Returns the settings of ``count`` universes, with what is left out; see `make_universes`."""
    _at_least("count", count, 1)
    return UniverseSettings(
        size=size,
        box_size=VOXEL_SIDE * size if box_size is None else float(box_size),
        seed=seed,
        parameters=tuple(parameters),
        particles=size if particles is None else particles,
        steps=steps,
        ranges=ranges,
    )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise DataError(f"{name} must be at least {least}, not {value}")
