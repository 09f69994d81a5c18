"""`nibabel`, which is optional."""

from hyperslab.data.library import nibabel as load

__all__ = ["load"]
