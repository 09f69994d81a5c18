"""`nibabel`, which is optional."""

from hyperslab.formats.shared.optional import nibabel as load

__all__ = ["load"]
