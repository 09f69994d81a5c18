"""hyperslab: train any PyTorch 3D CNN on volumes larger than one device.

A name is imported when it is first asked for, so that a program which needs one of them waits for
no other, and ``hyperslab --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    from hyperslab.parallel import no_sync, parallelize
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

_MODULES = {
    "hyperslab.checkpoint.save_load": ("load", "save"),
    "hyperslab.comm": ("Grid",),
    "hyperslab.data": ("Source", "open"),
    "hyperslab.errors": (
        "CommError",
        "DataError",
        "HyperslabError",
        "LayoutError",
        "RecipeError",
        "UnsupportedOp",
    ),
    "hyperslab.parallel": ("no_sync", "parallelize"),
    "hyperslab.studies.fit": ("TrainedRun", "fit"),
    "hyperslab.tensor": (
        "LoadedBoxes",
        "Sharded",
        "boxes",
        "gather",
        "register",
        "scatter",
        "shard",
    ),
}
"""The module of each name, as the imports above have it for type checkers."""

_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = found
        return found
    if not name.startswith("_"):  # a package, such as formats; tools ask for other names
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as missing:
            if missing.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
