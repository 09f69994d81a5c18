"""Imports the optional libraries of single formats: zarr, nibabel, SimpleITK, MONAI, mpi4py."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hyperslab.errors import HyperslabError
from hyperslab.util.optional_libraries import how_to_install, importing


def zarr() -> ModuleType:
    """Returns the module ``zarr``.

    Raises:
        HyperslabError: the extra ``zarr`` is not installed.
    """
    with importing("zarr", "Zarr"):
        import zarr
    return zarr


def nibabel() -> ModuleType:
    """Returns the module ``nibabel``.

    Raises:
        HyperslabError: the extra ``medical`` is not installed.
    """
    with importing("medical", "NIfTI"):
        import nibabel
    return nibabel


def simple_itk() -> Any:
    """Returns the module ``SimpleITK``.

    Raises:
        HyperslabError: the extra ``medical`` is not installed.
    """
    with importing("medical", "resampling"):
        import SimpleITK
    return SimpleITK


def monai_data() -> ModuleType:
    """Returns the module ``monai.data.utils``.

    Raises:
        HyperslabError: the extra ``medical`` is not installed.
    """
    with importing("medical", "a sliding window"):
        import monai.data.utils
    return monai.data.utils


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
