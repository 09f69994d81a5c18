"""One element at a time: pointwise operators, dropout, new tensors alike."""

from hyperslab.ops.elementwise import creation, dropout, pointwise

__all__ = ["creation", "dropout", "pointwise"]
