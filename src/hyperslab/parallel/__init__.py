"""Makes modules run on cut tensors, with the gradients of the serial run."""

from hyperslab.parallel.graphed import graphed
from hyperslab.parallel.parallelize import no_sync, parallelize

__all__ = ["graphed", "no_sync", "parallelize"]
