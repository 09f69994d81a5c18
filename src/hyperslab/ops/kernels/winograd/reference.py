"""The weight's gradient by torch's own operators, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.direct.reference import direct_convolution_gradient

KERNEL = (3, 3, 3)
"""The windows' extents."""


def winograd_gradient(
    x: torch.Tensor, g: torch.Tensor, padding: Sequence[int], with_bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the schema."""
    return direct_convolution_gradient(x, g, KERNEL, padding, with_bias)
