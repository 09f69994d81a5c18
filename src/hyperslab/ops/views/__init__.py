"""Views and copies of elements: reshape, permute, expand, slicing, concatenation."""

from hyperslab.ops.views import concat, expand, permute, reshape, slicing

__all__ = ["concat", "expand", "permute", "reshape", "slicing"]
