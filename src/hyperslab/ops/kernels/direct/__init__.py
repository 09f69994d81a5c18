"""Convolution of a volume of few channels in bfloat16, summed in registers.

Importing this package registers two operators with torch, whose schemas are in
`hyperslab.ops.kernels.direct.operators`::

    torch.ops.hyperslab.direct_convolution           the convolution, or its input's gradient
    torch.ops.hyperslab.direct_convolution_gradient  the gradients of weight and bias

OneDNN works on 16 channels at a time whatever there are. `compiled.is_known` says whether this
processor has the instructions; elsewhere the operators are torch's own, in float32.
"""

from hyperslab.ops.kernels.direct import compiled, operators

__all__ = ["compiled", "operators"]
