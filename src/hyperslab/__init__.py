"""hyperslab: train any PyTorch 3D CNN on volumes larger than one device."""

from __future__ import annotations

from hyperslab import models
from hyperslab.comm import Grid
from hyperslab.errors import (
    CommError,
    DataError,
    HyperslabError,
    LayoutError,
    RecipeError,
    UnsupportedOp,
)
from hyperslab.nn import parallelize
from hyperslab.tensor import Sharded, gather, register, shard

__all__ = [
    "CommError",
    "DataError",
    "Grid",
    "HyperslabError",
    "LayoutError",
    "RecipeError",
    "Sharded",
    "UnsupportedOp",
    "gather",
    "models",
    "parallelize",
    "register",
    "shard",
]
