"""The ways to compute each pass, and the rule that chooses one from shape and type alone."""

from hyperslab.ops.kernels.convolution.options import Task
from hyperslab.ops.kernels.convolution.variants.forward import FORWARD_VARIANTS
from hyperslab.ops.kernels.convolution.variants.input_pass import INPUT_VARIANTS
from hyperslab.ops.kernels.convolution.variants.rule import fixed
from hyperslab.ops.kernels.convolution.variants.variant import ConvVariant, ConvVariants
from hyperslab.ops.kernels.convolution.variants.weight_pass import WEIGHT_VARIANTS

__all__ = ["CONV_VARIANTS", "ConvVariant", "fixed"]

CONV_VARIANTS: dict[Task, ConvVariants] = {
    "forward": FORWARD_VARIANTS,
    "input": INPUT_VARIANTS,
    "weight": WEIGHT_VARIANTS,
}
