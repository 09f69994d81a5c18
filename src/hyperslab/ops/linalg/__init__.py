"""Dense layers, matrix products, attention."""

from hyperslab.ops.linalg import attention, cdist, linear, matmul, recurrent

__all__ = ["attention", "cdist", "linear", "matmul", "recurrent"]
