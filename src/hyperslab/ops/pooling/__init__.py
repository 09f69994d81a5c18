"""Poolings and their inverse."""

from hyperslab.ops.pooling import adaptive_avg_pool, adaptive_max_pool, lp_pool, max_unpool, pool

__all__ = ["adaptive_avg_pool", "adaptive_max_pool", "lp_pool", "max_unpool", "pool"]
