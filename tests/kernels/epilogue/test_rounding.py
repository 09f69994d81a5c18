"""Results in bfloat16 are rounded as by torch, subnormal ones and NaN too (tier: no process)."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_upper_half_is_rounded_as_torch_does(low: int) -> None:
    words = torch.arange(-(1 << 15), 1 << 15) << 16 | low
    x = words.to(torch.int32).view(torch.float32).view(1, 16, 16, 16, 16)
    x = x.to(memory_format=torch.channels_last_3d)
    y, _ = torch.ops.hyperslab.chain_forward(x, None, 1.0, [], False, False, torch.bfloat16)
    torch.testing.assert_close(y, x.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)
