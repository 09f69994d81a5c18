"""Distributes convolutions and transposed convolutions."""

from hyperslab.ops.convolution import conv

__all__ = [
    "conv",
]
