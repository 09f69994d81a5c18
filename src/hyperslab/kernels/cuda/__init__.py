"""Runs the fused kernels on a CUDA device, in Triton (https://triton-lang.org).

They are the same operators as those of `hyperslab.kernels.epilogue`, `normalization` and
`reorder`, whose plain references tests compare them with, in Triton's interpreter too
(``TRITON_INTERPRET=1``), which needs no device. They are imported when one of them is first
called on a CUDA tensor.

A block is worked on in tiles of some voxels x some channels of one sample; both memory formats
are the same kernel, for which a voxel and a channel are so many elements apart.
"""
