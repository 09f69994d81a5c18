"""Both sides of the benchmark of fused chains do the same (tier: no process)."""

from __future__ import annotations

import pytest
import torch
from fused import FORMATS, chains, measure


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=str)
def test_both_sides_give_the_same(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    x = torch.randn(1, 3, 4, 6, 8).to(dtype).contiguous(memory_format=memory_format)
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    found = list(chains(x, 2))
    assert len({chain.name for chain in found}) == len(found) == 8
    for chain in found:
        fused = chain.fused()
        torch.testing.assert_close(
            fused.double(), chain.separate().double(), rtol=rtol, atol=rtol, msg=chain.name
        )


def test_every_chain_is_measured_in_both_formats() -> None:
    speeds = list(measure((1, 2, 4, 4, 4), torch.float32, 2, turns=1))
    assert len(speeds) == 16
    assert all(speed.fused > 0 and speed.separate > 0 and speed.copy > 0 for speed in speeds)
