"""The rules of torch's operators on cut tensors, one family per file."""

from hyperslab.nn import (  # noqa: F401  (importing a family registers its rules)
    adaptiveavg,
    adaptivemax,
    attributes,
    cat,
    checkpoint,
    conv,
    creation,
    dropout,
    expand,
    flip,
    gradient,
    groupnorm,
    index,
    indexitem,
    interpolate,
    layernorm,
    linear,
    localnorm,
    loss,
    losslabels,
    lppool,
    norm,
    pad,
    permute,
    pixelshuffle,
    pointwise,
    pool,
    reduce,
    shape,
    transposed,
    unpool,
)
from hyperslab.nn.parallelize import parallelize

__all__ = ["parallelize"]
