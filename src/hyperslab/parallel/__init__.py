"""What `parallelize` does to a module."""

from hyperslab.parallel.parallelize import parallelize

__all__ = ["parallelize"]
