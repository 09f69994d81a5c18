"""Distributes operators that resample, pad or move voxels."""

from hyperslab.ops.spatial import interpolate, pad, rearrange

__all__ = [
    "interpolate",
    "pad",
    "rearrange",
]
