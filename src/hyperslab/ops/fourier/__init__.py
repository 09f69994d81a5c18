"""Fourier transforms, by the pencil method where dims are cut, and complex numbers."""

from hyperslab.ops.fourier import complex_numbers, shift, transforms

__all__ = ["complex_numbers", "shift", "transforms"]
