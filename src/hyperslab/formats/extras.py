"""Extras: what a file holds beside its voxels, such as physical parameters and attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

PUBLIC_KEYS = ("full", "unitPar")
"""Of the public CosmoFlow files, for what comes from files without keys."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What a file holds beside its voxels, to be carried into another format.

    ``keys``: of volume and targets, by which a file with keys knows them. ``names``: of the
    parameters. ``arrays``: physical values and redshifts, where they are known. ``attributes``: of
    a file with keys. ``affine`` (4, 4): (d, h, w, 1) to (x, y, z, 1) [mm], RAS+.
    """

    keys: tuple[str, str] = PUBLIC_KEYS
    names: tuple[str, ...] = ()
    target: NDArray[Any] | None = None
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    affine: NDArray[Any] | None = None
