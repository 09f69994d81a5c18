"""Dense layers, matrix products, attention."""

from hyperslab.ops.linalg import attention, linear, matmul, recurrent

__all__ = ["attention", "linear", "matmul", "recurrent"]
