"""hyperslab: train any PyTorch 3D CNN on volumes larger than one device.

A name is imported when it is first asked for, so that a program which needs one of them waits for
no other, and ``hyperslab --help`` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyperslab.util import importing_names

if TYPE_CHECKING:
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
    from hyperslab.parallel import graphed, no_sync, parallelize
    from hyperslab.studies.fit import TrainedRun, fit
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
    "TrainedRun",
    "UnsupportedOp",
    "boxes",
    "fit",
    "formats",
    "gather",
    "graphed",
    "load",
    "losses",
    "models",
    "no_sync",
    "open",
    "parallelize",
    "register",
    "save",
    "scatter",
    "shard",
]

__getattr__ = importing_names(__name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
