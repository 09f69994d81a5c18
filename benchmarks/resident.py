"""The memory of a process, and the most that a step of training takes of it."""

from __future__ import annotations

from pathlib import Path

import torch
from networks import Step, make_case

import hyperslab as hs

STEPS = 3
"""The optimizer makes its state in the first."""


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process [B]; of its own since it began, not of its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def peak_memory(network: str, width: int, batch_norm: bool, axes: dict[str, int]) -> dict[str, int]:
    """The most that this fresh process held [B], and what of it the network and its steps took.

    With no ``axes`` the plain module and a plain tensor: the serial run. Float32, Adam, one thread;
    the C library keeps what is freed on both sides.
    """
    grid = hs.Grid(**axes)
    before = resident("VmRSS")
    case = make_case(network, width, batch_norm, grid.device)
    if axes:
        case.cut(grid)
    step = Step(case, torch.float32)
    for _ in range(STEPS):
        step.run()
    peak = resident("VmHWM")
    return {"process": peak, "step": peak - before}
