"""Imports the optional libraries of single formats: zarr, nibabel, SimpleITK, MONAI, mpi4py."""

from __future__ import annotations

import importlib
from typing import Any

from hyperslab.errors import HyperslabError
from hyperslab.util.optional_libraries import how_to_install, importing

LIBRARIES = {
    "zarr": ("zarr", "Zarr"),
    "nibabel": ("medical", "NIfTI"),
    "SimpleITK": ("medical", "resampling"),
    "monai.data.utils": ("medical", "a sliding window"),
}
"""The extra of each library, and what it is for."""


def library(name: str) -> Any:
    """Returns the module of this name.

    Raises:
        HyperslabError: its extra is not installed.
    """
    with importing(*LIBRARIES[name]):
        return importlib.import_module(name)


def mpi() -> Any:
    """Returns the module ``mpi4py.MPI``, which starts MPI when it is imported.

    Raises:
        HyperslabError: the extra ``mpi`` is not installed.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter: there is no MPI library
        raise HyperslabError(
            f"MPI needs another library ({error}): {how_to_install('mpi')}"
        ) from error
    return MPI
