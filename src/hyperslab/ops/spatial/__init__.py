"""What resamples or moves voxels."""

from hyperslab.ops.spatial import flip_roll, grid_sample, interpolate, pad, pixel_shuffle

__all__ = ["flip_roll", "grid_sample", "interpolate", "pad", "pixel_shuffle"]
