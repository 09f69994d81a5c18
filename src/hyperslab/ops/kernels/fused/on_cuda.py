"""Which version of the fused operators runs on a CUDA device: Triton's, where it is installed.

PyTorch for CUDA brings Triton with it. The kernels are read in at the first call.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from hyperslab.ops.kernels.fused.operators import FUSED_OPERATORS, FusedOperator

COMPUTED = (torch.float32, torch.bfloat16, torch.float16)
"""Types of blocks that the kernels take; of others the reference runs."""


@cache
def triton_versions() -> dict[str, Callable[..., Any]]:
    """By the operator's name."""
    from hyperslab.ops.kernels.fused.gpu import backward, forward, numbers, reorder, sums

    return {
        "channel_sums": sums.triton_channel_sums,
        "chain_forward": forward.triton_chain_forward,
        "chain_backward_sums": sums.triton_chain_backward_sums,
        "chain_backward": backward.triton_chain_backward,
        "normalisation": numbers.triton_normalisation,
        "parameter_gradients": numbers.triton_parameter_gradients,
        "through_statistics": numbers.triton_through_statistics,
        "reorder": reorder.triton_reorder,
    }


def _version(operator: FusedOperator) -> Callable[..., Any]:
    def run(block: torch.Tensor, *rest: Any) -> Any:
        others = [value for value in rest if isinstance(value, torch.Tensor | torch.dtype)]
        types = {value if isinstance(value, torch.dtype) else value.dtype for value in others}
        if not {block.dtype, *types} <= {*COMPUTED, torch.uint8}:
            return operator.reference(block, *rest)
        with torch.cuda.device(block.device):  # Triton starts its kernels on the current one
            return triton_versions()[operator.name](block, *rest)

    return run


def _registered() -> torch.library.Library | None:
    if importlib.util.find_spec("triton") is None:
        return None
    library = torch.library.Library("hyperslab", "IMPL")
    for operator in (operator for operator in FUSED_OPERATORS if operator.on_gpu):
        library.impl(operator.name, _version(operator), "CUDA")
    return library


ON_CUDA = _registered()
"""Keeps the registration alive; None without Triton."""
