"""hyperslab: train any PyTorch 3D CNN on volumes larger than one device."""

from __future__ import annotations

import hyperslab.beginning  # first: before anything that takes time
import hyperslab.ops  # noqa: F401 - enters the rules of torch's operators
from hyperslab import formats, losses, models
from hyperslab.checkpoint.save_load import load, save
from hyperslab.comm import Grid
from hyperslab.data import Source, open
from hyperslab.errors import (
    CommError,
    DataError,
    HyperslabError,
    LayoutError,
    RecipeError,
    UnsupportedOp,
)
from hyperslab.parallel import parallelize
from hyperslab.tensor import LoadedBoxes, Sharded, boxes, gather, register, scatter, shard

__all__ = [
    "CommError",
    "DataError",
    "Grid",
    "HyperslabError",
    "LayoutError",
    "LoadedBoxes",
    "RecipeError",
    "Sharded",
    "Source",
    "UnsupportedOp",
    "boxes",
    "formats",
    "gather",
    "load",
    "losses",
    "models",
    "open",
    "parallelize",
    "register",
    "save",
    "scatter",
    "shard",
]
