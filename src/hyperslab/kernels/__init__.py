"""Computes operators on one block, without any rank: one module an operator.

A module declares its operators: schema, plain reference, and the versions that run. `registry`
alone decides which one runs; ``python -m hyperslab.kernels`` prints its rule. `compile` builds the
sources of `csrc`; `conv` has the convolution, `cuda` the versions in Triton.
"""

# Importing these modules declares their operators to torch.
from hyperslab.kernels import (  # noqa: F401
    conv_in_c,
    epilogue,
    max_pool,
    normalization,
    random_bits,
    reorder,
    resample,
)
