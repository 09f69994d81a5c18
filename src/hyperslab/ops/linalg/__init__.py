"""Dense layers, matrix products, attention, Fourier transforms."""

from hyperslab.ops.linalg import attention, fft, linear, matmul

__all__ = ["attention", "fft", "linear", "matmul"]
