"""Indexing: square brackets, gather, scatter."""

from hyperslab.ops.indexing import gather, getitem, scatter

__all__ = ["gather", "getitem", "scatter"]
