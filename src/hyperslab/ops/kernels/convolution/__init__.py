"""The convolution of one block, forward and backward.

[Note: passes] A convolution has three passes, and a transposed one the same three, in another
order::

                            convolution    transposed convolution
    forward                 "forward"      "input"
    gradient of its input   "input"        "forward"
    gradient of its weight  "weight"       "weight", the two volumes changing places

Each pass has several *variants*, modules `forward`, `input_pass` and `weight_pass`; `rule` says
which one runs, or a measurement does (`measured`).
"""

from hyperslab.ops.kernels.convolution.block import conv_backward, conv_forward
from hyperslab.ops.kernels.convolution.layout import computes_last, torch_makes_columns
from hyperslab.ops.kernels.convolution.local import (
    LocalConv,
    Passes,
    converted,
    differentiable_conv,
)
from hyperslab.ops.kernels.convolution.options import KERNELS, ConvOptions, Kernels
from hyperslab.ops.kernels.convolution.recomputed import Kept, Recomputed
from hyperslab.ops.kernels.convolution.reference import reference
from hyperslab.ops.kernels.convolution.torchs_own import Gradients
from hyperslab.ops.kernels.convolution.transposed import transposed_backward, transposed_forward

__all__ = [
    "KERNELS",
    "ConvOptions",
    "Gradients",
    "Kept",
    "Kernels",
    "LocalConv",
    "Passes",
    "Recomputed",
    "computes_last",
    "conv_backward",
    "conv_forward",
    "converted",
    "differentiable_conv",
    "reference",
    "torch_makes_columns",
    "transposed_backward",
    "transposed_forward",
]
