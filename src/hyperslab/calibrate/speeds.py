"""Peak speed, memory bandwidth and launch of a rank, while all ranks work."""

from __future__ import annotations

from functools import partial

import torch

from hyperslab.calibrate.clock import Clock

MATRIX = 1024  # rows of the matrices of which the product is timed
TRIAD = 64 << 20  # [B] of each of three arrays: more than caches hold
PEAK_DTYPES = (torch.float32, torch.bfloat16)


def peak_flops(clock: Clock) -> dict[str, float]:
    """[flop/s] of a product of matrices, by dtype."""
    found = {}
    for dtype in PEAK_DTYPES:
        a = torch.rand(MATRIX, MATRIX, device=clock.grid.device).to(dtype)
        b = a.t().contiguous()
        out = torch.empty_like(a)
        seconds = clock.least.seconds(partial(torch.mm, a, b, out=out))
        found[str(dtype).removeprefix("torch.")] = 2 * MATRIX**3 / seconds
    return found


def memory_bandwidth(clock: Clock) -> float:
    """[B/s] of a triad, a = b + s c, which reads two arrays and writes one."""
    b = torch.rand(TRIAD // 4, device=clock.grid.device)
    c = b.clone()
    a = torch.empty_like(b)
    return 3 * TRIAD / clock.seconds(lambda: torch.add(b, c, alpha=3.0, out=a))


def launch_seconds(clock: Clock) -> float:
    """[s] of an operator on a single element."""
    x = torch.ones(1, device=clock.grid.device)
    return clock.seconds(lambda: x.add_(1))
