"""Registers the rules of torch's operators on cut tensors: one module a family.

The families have torch's own words. What they share: `overloads` (one rule for several
operators), `operands` (one partition for several tensors), `positions` (in several dims),
`placement` (windows, cuts and halos), `fusion` (deferred epilogues) and `filter_parallel` (layers
that are not cut).
"""

# Importing these modules registers their rules.
from hyperslab.ops import (  # noqa: F401
    attention,
    autograd,
    convolution,
    elementwise,
    fourier,
    indexing,
    linalg,
    losses,
    normalization,
    pooling,
    reductions,
    sampling,
    scans,
    spatial,
    views,
)
from hyperslab.tensor import attributes  # noqa: F401
