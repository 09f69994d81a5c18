"""Loss functions of torch."""

from hyperslab.ops.losses import cross_entropy, elementwise

__all__ = ["cross_entropy", "elementwise"]
