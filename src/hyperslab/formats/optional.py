"""Imports the optional libraries of single formats: zarr, nibabel, SimpleITK, MONAI, mpi4py.

Each function returns a module, or raises a `HyperslabError` that says which extra is not installed.
"""

from __future__ import annotations

import logging
from typing import Any

from hyperslab.errors import HyperslabError
from hyperslab.util.optional_libraries import how_to_install, importing


def zarr() -> Any:
    with importing("zarr", "Zarr"):
        import zarr
    return zarr


def _is_news(told: logging.LogRecord) -> bool:
    """Tells of a line of nibabel's that it is not the one that each read of odd files has."""
    return "not SPM compatible" not in told.getMessage()


def nibabel() -> Any:
    with importing("medical", "NIfTI"):
        import nibabel
    logging.getLogger("nibabel.global").addFilter(_is_news)  # which is there once
    return nibabel


def simple_itk() -> Any:
    with importing("medical", "resampling"):
        import SimpleITK
    return SimpleITK


def monai_data() -> Any:
    with importing("medical", "a sliding window"):
        import monai.data.utils
    return monai.data.utils


def mpi() -> Any:
    """Returns the module ``mpi4py.MPI``, which starts MPI when it is imported."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter: there is no MPI library
        raise HyperslabError(
            f"MPI needs another library ({error}): {how_to_install('mpi')}"
        ) from error
    return MPI
