"""Reductions over dims, cut or not; softmax, sorting and scans."""

from hyperslab.ops.reductions import (
    distances,
    extrema,
    histogram,
    norms,
    softmax,
    sort_scan,
    sums,
    variance,
)

__all__ = ["distances", "extrema", "histogram", "norms", "softmax", "sort_scan", "sums", "variance"]
