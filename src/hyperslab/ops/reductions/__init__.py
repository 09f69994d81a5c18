"""Distributes reductions over dims, cut or not; softmax, sorting and scans."""

from hyperslab.ops.reductions import extrema, norms, softmax, sums

__all__ = [
    "extrema",
    "norms",
    "softmax",
    "sums",
]
