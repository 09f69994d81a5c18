"""The one place that imports `nibabel`, which is optional."""

from __future__ import annotations

from types import ModuleType

from hyperslab.errors import HyperslabError


def load() -> ModuleType:
    """The module ``nibabel``.

    Raises:
        HyperslabError: if the extra ``medical`` is not installed.
    """
    try:
        import nibabel
    except ImportError as error:
        raise HyperslabError(
            f"NIfTI files need another library ({error}): pip install hyperslab[medical]"
        ) from error
    return nibabel
