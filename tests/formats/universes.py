"""Files written by hand, and seats on a grid without processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

from hyperslab import Grid
from hyperslab.comm import AXES

NAMES = ("Omega_m", "sigma_8", "N_spec", "H_0")
CENTRE = np.array([0.3, 0.8, 0.96, 70.0])


class Seat(Grid):
    """One rank of a grid, alone in this process: for everything that does not communicate."""

    def __init__(self, rank: int = 0, **extents: int) -> None:
        self.extents = {axis: extents.get(axis, 1) for axis in AXES}
        self.data, self.depth, self.height, self.width = self.extents.values()
        self.size = int(np.prod(list(self.extents.values())))
        self.rank, self.coords = rank, self.coords_of(rank)
        self.device = torch.device("cpu")

    def group(self, axes: Sequence[str]) -> None:
        assert self.size == 1, "a seat is alone in its process"

    @classmethod
    def all(cls, **extents: int) -> list[Seat]:
        return [cls(rank, **extents) for rank in range(int(np.prod(list(extents.values()))))]


GRIDS: list[dict[str, int]] = [
    {"depth": 1},
    {"depth": 3},
    {"depth": 2, "height": 2},
    {"data": 2, "width": 3},
    {"data": 2, "depth": 2, "height": 3, "width": 2},
]


def counts(seed: int, shape: Sequence[int], dtype: str = "int16") -> NDArray[Any]:
    return np.random.default_rng(seed).poisson(1.0, shape).astype(dtype)


def unit(seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(1000 + seed).uniform(-1, 1, 4)


def public(path: Path, volume: NDArray[Any], seed: int = 0, **change: Any) -> None:
    """The public CosmoFlow layout; ``change`` replaces keys, None leaves one out."""
    keys: dict[str, Any] = {
        "full": volume,
        "unitPar": unit(seed),
        "physPar": CENTRE * (1 + 0.1 * unit(seed)),
        "namePar": np.array(NAMES, "S10"),
        "redshifts": np.array([0.0, 0.5, 1.5, 3.0]),
    } | change
    write(path, **keys)


def write(path: Path, **keys: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for key, value in keys.items():
            if value is not None:
                file[key] = value


def folder(path: Path, count: int, shape: Sequence[int] = (7, 7, 7, 4)) -> list[NDArray[Any]]:
    """Public files, the same base names in two sub-folders; their volumes (C, D, H, W) in order."""
    half = -(-count // 2)
    for i in range(count):
        name = f"{'ab'[i // half]}/univ_{i % half:03d}.hdf5"
        public(path / name, counts(i, shape), i)
    return [np.moveaxis(counts(i, shape), -1, 0) for i in range(count)]
