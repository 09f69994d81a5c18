"""Makes modules run on cut tensors, with the gradients of the serial run."""

from hyperslab.parallel.parallelize import no_sync, parallelize

__all__ = ["no_sync", "parallelize"]
