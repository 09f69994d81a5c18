"""The maximum over windows that may overlap, with a byte an element for its gradient.

Importing this package registers two operators with torch, whose schemas are in
`hyperslab.ops.kernels.windows.operators`::

    torch.ops.hyperslab.window_maximum           the maxima, and which tap of its window each is
    torch.ops.hyperslab.window_maximum_backward  every gradient to its winner

Torch's own keeps the block and eight bytes an element of the result. A *tap* is an element of the
window, numbered row by row; the *winner* is the first tap that is not less than any other, or the
last NaN. They have no graph: `hyperslab.ops.pooling.window_maximum` has.
"""

from hyperslab.ops.kernels.windows import operators

__all__ = ["operators"]
