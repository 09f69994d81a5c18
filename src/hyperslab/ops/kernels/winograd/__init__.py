"""The weight's gradient of convolutions with windows of 3³ voxels, by Winograd's filtering.

Importing this package registers an operator with torch, whose schema is in
`hyperslab.ops.kernels.winograd.operators`::

    torch.ops.hyperslab.winograd_gradient  the gradients of weight and bias

64 products of sums do the work of 216. The forward pass and the input's gradient are not made so:
there a rounding error, or an infinity, would reach voxels whose windows do not see where it comes
from. The weight's gradient is a sum over all voxels anyway. `compiled.winograd_is_known` says
whether this processor has the instructions; elsewhere the operator is torch's own, in float32.
"""

from hyperslab.ops.kernels.winograd import compiled, operators

__all__ = ["compiled", "operators"]
