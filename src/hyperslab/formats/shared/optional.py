"""The one place that imports the libraries of single formats, which are optional."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hyperslab.errors import HyperslabError
from hyperslab.optional_libraries import how_to_install


def zarr() -> ModuleType:
    """The module ``zarr``.

    Raises:
        HyperslabError: the extra ``zarr`` is not installed.
    """
    try:
        import zarr
    except ImportError as error:
        raise HyperslabError(
            f"Zarr needs another library ({error}): {how_to_install('zarr')}"
        ) from error
    return zarr


def nibabel() -> ModuleType:
    """The module ``nibabel``.

    Raises:
        HyperslabError: the extra ``medical`` is not installed.
    """
    try:
        import nibabel
    except ImportError as error:
        raise HyperslabError(
            f"NIfTI files need another library ({error}): {how_to_install('medical')}"
        ) from error
    return nibabel


def simple_itk() -> Any:
    """The module ``SimpleITK``.

    Raises:
        HyperslabError: the extra ``medical`` is not installed.
    """
    try:
        import SimpleITK
    except ImportError as error:
        raise HyperslabError(
            f"resampling needs another library ({error}): {how_to_install('medical')}"
        ) from error
    return SimpleITK


def monai_data() -> ModuleType:
    """The module ``monai.data.utils``.

    Raises:
        HyperslabError: the extra ``medical`` is not installed.
    """
    try:
        import monai.data.utils
    except ImportError as error:
        raise HyperslabError(
            f"sliding windows need another library ({error}): {how_to_install('medical')}"
        ) from error
    return monai.data.utils


def mpi() -> Any:
    """The module ``mpi4py.MPI``, which starts MPI when it is imported.

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
