"""One element at a time: pointwise operators, dropout, new tensors alike."""

from hyperslab.ops.elementwise import activations, creation, dropout, pointwise

__all__ = ["activations", "creation", "dropout", "pointwise"]
