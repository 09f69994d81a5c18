"""Convolutions and transposed convolutions."""

from hyperslab.ops.convolution import conv, conv_transpose

__all__ = ["conv", "conv_transpose"]
