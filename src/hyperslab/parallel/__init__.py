"""Makes modules run on cut tensors, with the gradients of the serial run."""

from hyperslab.parallel.parallelize import parallelize

__all__ = ["parallelize"]
