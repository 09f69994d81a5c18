"""hyperslab: train any PyTorch 3D CNN on volumes larger than one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hyperslab.util.startup  # isort: skip # first: before anything that takes time
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

if TYPE_CHECKING:  # they take a second to import, and many programs do without
    from hyperslab.scripting import TrainedRun, fit

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
    "TrainedRun",
    "UnsupportedOp",
    "boxes",
    "fit",
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


def __getattr__(name: str) -> Any:
    if name == "fit":
        from hyperslab.scripting import fit

        return fit
    if name == "TrainedRun":
        from hyperslab.scripting import TrainedRun

        return TrainedRun
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
