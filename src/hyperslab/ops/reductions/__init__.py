"""Dims that are summed, searched, sorted or scanned."""

from hyperslab.ops.reductions import distances, extrema, norms, softmax, sort_scan, sums, variance

__all__ = ["distances", "extrema", "norms", "softmax", "sort_scan", "sums", "variance"]
