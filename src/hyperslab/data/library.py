"""The one place that imports the libraries of single formats, which are optional."""

from __future__ import annotations

from types import ModuleType

from hyperslab.errors import HyperslabError


def zarr() -> ModuleType:
    """The module ``zarr``.

    Raises:
        HyperslabError: the extra ``zarr`` is not installed.
    """
    try:
        import zarr
    except ImportError as error:
        raise HyperslabError(
            f"Zarr needs another library ({error}): pip install hyperslab[zarr]"
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
            f"NIfTI files need another library ({error}): pip install hyperslab[medical]"
        ) from error
    return nibabel
