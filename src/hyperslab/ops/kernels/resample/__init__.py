"""A linear map along every spatial dim of a block, in one pass: interpolation and its adjoint.

Importing this package registers an operator with torch, whose schema is in
`hyperslab.ops.kernels.resample.operators`::

    torch.ops.hyperslab.resample   each result is a weighted sum of a few elements

What the results of a dim are made of is a `maps.SparseMap`; the adjoint of one is another. The
operator has no graph: `hyperslab.ops.spatial.resample` has.
"""

from hyperslab.ops.kernels.resample import operators

__all__ = ["operators"]
