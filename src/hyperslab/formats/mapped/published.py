"""Data sets as they are published: how their files are named, their parameters and priors.

CAMELS: the Multifield Dataset's 3D grids, https://camels-multifield-dataset.readthedocs.io
(Villaescusa-Navarro et al. 2021, arXiv:2109.10915). Quijote: its latin hypercubes and density
fields, https://quijote-simulations.readthedocs.io (Villaescusa-Navarro et al. 2020,
arXiv:1909.05273).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Ranges = dict[str, tuple[float, float]]

CAMELS = re.compile(r"Grids_[A-Za-z]+_(?P<suite>\w+)_(?P<set>[A-Za-z0-9]+)_\d+_z=[\d.]+\.npy")
CAMELS_PRIORS: Ranges = {
    "Omega_m": (0.1, 0.5),
    "sigma_8": (0.6, 1.0),
    "A_SN1": (0.25, 4.0),
    "A_AGN1": (0.25, 4.0),
    "A_SN2": (0.5, 2.0),
    "A_AGN2": (0.5, 2.0),
}

QUIJOTE_FIELD = re.compile(r"df_\w+_z=[\d.]+\.npy")
QUIJOTE_REALISATION = re.compile(r"(NCV_)?\d+")
QUIJOTE_TABLES = ("latin_hypercube*params.txt", "BSQ_params.txt")
QUIJOTE_PRIORS: Ranges = {
    "Omega_m": (0.1, 0.5),
    "Omega_b": (0.03, 0.07),
    "h": (0.5, 0.9),
    "n_s": (0.8, 1.2),
    "sigma_8": (0.6, 1.0),
}

LOOKED_AT = 64
"""Entries of a folder that tell what it is."""


@dataclass(frozen=True, slots=True)
class Published:
    """What is known of a data set: the ``pattern`` of its volumes, its ``table`` and ``priors``.

    ``parameters``: how many of the columns say something, where it is not all of them.
    ``stacked``: an array holds many volumes.
    """

    name: str
    pattern: str
    table: Path | None
    priors: Ranges
    parameters: int | None = None
    stacked: bool = False


def recognised(path: Path) -> Published | None:
    """The data set that a folder, or the file of one, is; None where it is not known."""
    if path.is_file():
        return _camels(path.parent, [path.name])
    if not path.is_dir():
        return None
    entries = sorted(entry.name for entry in itertools.islice(path.iterdir(), LOOKED_AT))
    return _camels(path, entries) or _quijote(path, entries)


def _camels(folder: Path, entries: list[str]) -> Published | None:
    found = [match for match in map(CAMELS.fullmatch, entries) if match]
    if not found:
        return None
    pattern = found[0][0] if len(entries) == 1 else "Grids_*.npy"
    gravity_only = found[0]["suite"].startswith("Nbody")
    tables = [
        folder / f"params_{found[0]['set']}_{suite}.txt" for suite in _suites(found[0]["suite"])
    ]
    table = next((table for table in tables if table.is_file()), None)
    parameters = 2 if gravity_only else None
    return Published("CAMELS", pattern, table, CAMELS_PRIORS, parameters, stacked=True)


def _suites(suite: str) -> Iterator[str]:
    """Of the tables: N-body simulations have those of the suite that they match."""
    yield suite
    if suite.startswith("Nbody"):
        yield "Nbody"
        yield suite.removeprefix("Nbody_")


def _quijote(folder: Path, entries: list[str]) -> Published | None:
    for entry in filter(QUIJOTE_REALISATION.fullmatch, entries):
        inside = folder / entry
        if not inside.is_dir():
            continue
        fields = [file.name for file in itertools.islice(inside.iterdir(), LOOKED_AT)]
        if any(map(QUIJOTE_FIELD.fullmatch, fields)):
            return Published("Quijote", "*/df_*.npy", _quijote_table(folder), QUIJOTE_PRIORS)
    return None


def _quijote_table(folder: Path) -> Path | None:
    for place in (folder, folder.parent):
        found = sorted(file for pattern in QUIJOTE_TABLES for file in place.glob(pattern))
        if len(found) == 1:
            return found[0]
    return None
