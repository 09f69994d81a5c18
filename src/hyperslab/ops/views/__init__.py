"""Other shapes of the same elements: reshape, permute, expand, slices, concatenation."""

from hyperslab.ops.views import concat, expand, permute, reshape, slicing

__all__ = ["concat", "expand", "permute", "reshape", "slicing"]
