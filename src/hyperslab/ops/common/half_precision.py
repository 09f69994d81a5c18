"""Numbers of 16 bits, which take part in sums as float32."""

from __future__ import annotations

import torch

HALF = (torch.float16, torch.bfloat16)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Partial sums of half precision are kept in float32: one of them may overflow."""
    return torch.float32 if dtype in HALF else dtype


def wide(block: torch.Tensor) -> torch.Tensor:
    """Half precision as float32: partial results may overflow, and are rounded once more."""
    return block.float() if block.dtype in HALF else block


def widened(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Parameters of half precision go with statistics of float32."""
    return None if parameter is None else wide(parameter)
