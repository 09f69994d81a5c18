"""Formats numbers, sizes and names as a reader wants them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hyperslab.train.metrics import ConfidenceInterval

LABELS = {"Omega_m": "Ωₘ", "sigma_8": "σ₈", "n_s": "nₛ", "N_spec": "nₛ", "H_0": "H₀"}
UNITS = {"H_0": "km/s/Mpc"}
MINUS = "\N{MINUS SIGN}"
DASH = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
DIGITS = 3  # significant ones
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
SCALES = ("B", "KiB", "MiB", "GiB", "TiB")


def label(name: str) -> str:
    """Returns a parameter's usual symbol; its name where none is known."""
    return LABELS.get(name, name)


def number(value: float | None) -> str:
    """Writes a number to three significant digits; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return DASH
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.{DIGITS - 1}e}".split("e")
        power = str(int(exponent)).translate(SUPERSCRIPTS)
        return f"{mantissa}·10{power}".replace("-", MINUS)
    places = DIGITS - 1 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:.{max(places, 0)}f}".replace("-", MINUS)


def interval_words(found: ConfidenceInterval) -> str:
    """Writes an estimate and its interval: ``0.143 (0.08 – 0.25)``."""
    return f"{number(found.value)} ({number(found.lower)} {DASH} {number(found.upper)})"


def duration(seconds: float) -> str:
    """Writes a time in its two largest units: ``75`` as ``1 min 15 s``."""
    if seconds < 60:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def scale_of(size: float) -> tuple[float, str]:
    """Chooses the unit that suits a size [B]: how many bytes it has, and its name."""
    power = 0 if size < 1 else min(int(math.log(size, 1024)), len(SCALES) - 1)
    return 1024.0**power, SCALES[power]


def size(value: float) -> str:
    """Writes a number of bytes, such as ``1.50 GiB``."""
    scale, unit = scale_of(value)
    return f"{number(value / scale)} {unit}"


def counted(count: int, thing: str) -> str:
    """Counts things: ``1 epoch``, ``2 epochs``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def slug(name: str) -> str:
    """Makes a part of a file's name of any name."""
    return "".join(c if c.isalnum() else "-" for c in name)


def times(values: Iterable[object]) -> str:
    """Joins extents: ``2 x 3 x 4``, with the right sign between."""
    return f" {TIMES} ".join(map(str, values))
