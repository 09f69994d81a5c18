"""Gradients asked for by hand, and recomputation."""

from hyperslab.ops.autograd import backward, grad

__all__ = ["backward", "grad"]
