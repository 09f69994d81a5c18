"""Folders in the layouts in which CAMELS and Quijote are published, in small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WIDTH = 16


def priors(low: list[float], high: list[float], count: int) -> NDArray[np.float64]:
    """A row of parameters for each simulation."""
    return np.random.default_rng(7).uniform(low, high, (count, len(low)))


def camels(
    folder: Path, count: int = 12, fields: tuple[str, ...] = ("Mcdm",)
) -> NDArray[np.float32]:
    """The Multifield Dataset: (N, D, H, W) of float32 in one file, six columns without a header."""
    folder.mkdir(parents=True, exist_ok=True)
    table = priors([0.1, 0.6, 0.25, 0.25, 0.5, 0.5], [0.5, 1.0, 4, 4, 2, 2], count)
    np.savetxt(folder / "params_LH_IllustrisTNG.txt", table, fmt="%.5f")
    random = np.random.default_rng(8)
    grids = random.lognormal(0, 1 + table[:, 0, None, None, None], (count, *[WIDTH] * 3))
    grids = (1e10 * grids).astype(np.float32)
    for number, field in enumerate(fields):
        name = f"Grids_{field}_IllustrisTNG_LH_128_z=0.0.npy"
        np.save(folder / name, grids * np.float32(1 + number))
    return grids


def quijote(folder: Path, count: int = 12, width: int = WIDTH) -> NDArray[np.float64]:
    """A latin hypercube: a folder for each realisation, and a table with a comment above it."""
    table = priors([0.1, 0.03, 0.5, 0.8, 0.6], [0.5, 0.07, 0.9, 1.2, 1.0], count)
    random = np.random.default_rng(9)
    for number in range(count):
        place = folder / "latin_hypercube" / str(number)
        place.mkdir(parents=True)
        density = random.lognormal(0, 1 + table[number, 0], [width] * 3) - 0.99
        np.save(place / "df_m_128_z=0.npy", density.astype(np.float32))
    np.savetxt(
        folder / "latin_hypercube" / "latin_hypercube_params.txt",
        table,
        header="Omega_m                 Omega_b                  h        n_s       sigma_8",
        comments="#",
    )
    return table
