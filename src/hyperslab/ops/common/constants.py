"""Numbers that Python knows, on the device of a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def constant(
    values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor of a few numbers. Its copy to a GPU waits for nothing that is queued there.

    `torch.tensor` with a device waits until all is done that the device was given before, and so
    does CUDA where the copy is not from page-locked memory.
    """
    host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
