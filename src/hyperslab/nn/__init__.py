"""The rules of torch's operators on cut tensors, one family per file."""

from hyperslab.nn import (  # noqa: F401  (importing a family registers its rules)
    attributes,
    checkpoint,
    conv,
    dropout,
    groupnorm,
    interpolate,
    layernorm,
    linear,
    localnorm,
    loss,
    losslabels,
    norm,
    pad,
    pointwise,
    pool,
    reduce,
    shape,
    transposed,
)
from hyperslab.nn.parallelize import parallelize

__all__ = ["parallelize"]
