"""Distributes poolings and their inverse."""

from hyperslab.ops.pooling import adaptive, pool, unpool

__all__ = [
    "adaptive",
    "pool",
    "unpool",
]
