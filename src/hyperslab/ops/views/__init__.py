"""Views and copies of elements: reshape, permute, expand, slicing, concatenation."""

from hyperslab.ops.views import concat, expand, permute, reshape, slicing, unfold

__all__ = ["concat", "expand", "permute", "reshape", "slicing", "unfold"]
