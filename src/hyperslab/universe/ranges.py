"""The ranges from which universes are drawn: three by name, and any others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hyperslab.errors import DataError
from hyperslab.formats.parameters import range_words
from hyperslab.universe.parameters import NAMES, OMEGA_B, PARAMETERS, Parameter, check_names

RANGES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "wide": {p.name: (p.physical(-1.0), p.physical(1.0)) for p in PARAMETERS},
    "public": {p.name: (0.9 * p.fiducial, 1.1 * p.fiducial) for p in PARAMETERS},
    "sc18": {
        "Omega_m": (0.25, 0.35),
        "sigma_8": (0.78, 0.95),
        "n_s": (0.9, 1.0),
        "H_0": (70.0, 70.0),
    },
}
"""Wide: ours, which small universes tell apart. Public: the published generator's ±10 %. SC18:
Mathuriya et al. 2018, section IV-C, where H_0 does not vary; its value is not stated."""


def parameters_in(words: str) -> tuple[Parameter, ...]:
    """The four parameters with the ranges that some words name, with commas.

    A word is one of `RANGES`, the first one only, or NAME=lo..hi; what is not named is as in
    ``wide``. A range of no width is a constant.

    >>> [p.fiducial for p in parameters_in("sc18,H_0=60..70")]
    [0.3, 0.865, 0.95, 65.0]

    Raises:
        DataError: a name is unknown or comes twice, a bound is no number, the lower one is the
            higher, or the parameters are none of a universe.
    """
    found = {p.name: p for p in PARAMETERS}
    said: set[str] = set()
    for number, word in enumerate(part.strip() for part in words.split(",")):
        name, equals, bounds = word.partition("=")
        if not equals and number == 0 and word in RANGES:
            if word != "wide":
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
        found[known] = _between(known, *_bounds(words, word, bounds))
    return tuple(_possible(found[name]) for name in NAMES)


def words_of_ranges(parameters: Sequence[Parameter]) -> str:
    """All ranges, as they are kept in a file."""
    return range_words({p.name: (p.physical(-1.0), p.physical(1.0)) for p in parameters})


def _bounds(words: str, word: str, bounds: str) -> tuple[float, float]:
    try:
        lo, hi = (float(bound) for bound in bounds.split(".."))
    except ValueError:
        raise DataError(
            f"ranges {words!r}: {word!r} needs two numbers, such as sigma_8=0.7..0.9"
        ) from None
    if not (math.isfinite(lo) and math.isfinite(hi)) or lo > hi:
        raise DataError(f"ranges {words!r}: {word!r} does not go from a number to a larger one")
    return lo, hi


def _between(name: str, lo: float, hi: float) -> Parameter:
    return Parameter(name, round((lo + hi) / 2, 12), round((hi - lo) / 2, 12))


def _possible(parameter: Parameter) -> Parameter:
    """The parameter itself; a range that no universe can have is refused before hours of work."""
    least = {"Omega_m": OMEGA_B, "sigma_8": 0.0, "H_0": 0.0}.get(parameter.name, -math.inf)
    most = {"Omega_m": 1.0}.get(parameter.name, math.inf)
    lo = parameter.physical(-1.0)
    hi = parameter.physical(1.0)
    if lo <= least or hi > most:
        words = f"above {least:g}" + (f" and at most {most:g}" if most < math.inf else "")
        raise DataError(f"{parameter.name} from {lo:g} to {hi:g}: it has to be {words}")
    return parameter
