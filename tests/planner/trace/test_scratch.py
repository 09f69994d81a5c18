"""What convolutions take while they run, against the system's count (tier: one process, forks)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hyperslab.kernels.memory_format import strides_in
from hyperslab.planner.records import Call, TensorSpec
from hyperslab.planner.unbacked_memory import scratch_of
from tests.forked import forked_commands

PROGRAM = """
import os, re, sys, torch
from hyperslab.util.free_memory import keep_freed_memory

def resident():
    status = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status).group(1)) << 10

keep_freed_memory()
torch.set_num_threads(1)
ones = [1] * 3

def run(which, x, w, y):
    if which == "forward":
        return torch.ops.aten.convolution(x, w, None, ones, ones, ones, False, [0] * 3, 1)
    mask = [which == "data", which == "filter", False]
    options = (None, ones, ones, ones, False, [0] * 3, 1, mask)
    return torch.ops.aten.convolution_backward(y, x, w, *options)

def operands(inp, out, side):
    shape = (side,) * 3
    return torch.randn(1, inp, *shape), torch.randn(out, inp, 3, 3, 3), torch.randn(1, out, *shape)

def measure(inp, out, side, which):
    run(which, *operands(16, 16, 40))
    given = operands(inp, out, side)
    before = resident()
    result = run(which, *given)
    results = result if isinstance(result, tuple) else [result]
    print(resident() - before - sum(r.nbytes for r in results if r is not None), flush=True)

# What one leaves behind is no memory of the next: each has a process of its own.
for case in sys.argv[1:]:
    inp, out, side, which = case.split(",")
    child = os.fork()
    if child == 0:
        measure(int(inp), int(out), int(side), which)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""

CASES = [
    (16, 32, 64, "forward"),
    (4, 16, 96, "forward"),
    (16, 32, 64, "data"),
    (16, 32, 64, "filter"),
    (4, 16, 96, "data"),
    (8, 8, 48, "forward"),  # by columns
    (8, 8, 48, "filter"),
]


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, strides_in(shape), torch.float32)


def predicted(inp: int, out: int, side: int, which: str) -> int:
    x = spec(1, inp, side, side, side)
    weight = spec(out, inp, 3, 3, 3)
    options = ((1,) * 3, (1,) * 3, (1,) * 3, False, (0,) * 3, 1)
    y = spec(1, out, side, side, side)
    if which == "forward":
        call = Call("aten.convolution.default", (x, weight, None, *options))
        return scratch_of(call, y, to_onednn=False)
    mask = (which == "data", which == "filter", False)
    call = Call("aten.convolution_backward.default", (y, x, weight, None, *options, mask))
    return scratch_of(call, (x, weight, None), to_onednn=False)


@pytest.fixture(scope="module")
def taken() -> dict[tuple[int, int, int, str], int]:
    """The bytes [B] that each case takes."""
    words = [",".join(map(str, case)) for case in CASES]
    command = [sys.executable, "-c", PROGRAM, *words]
    with forked_commands():
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(int, done.stdout.split()), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_what_the_process_takes(
    taken: dict[tuple[int, int, int, str], int], case: tuple[int, int, int, str]
) -> None:
    assert taken[case] == pytest.approx(predicted(*case), rel=0.25, abs=8 << 20)


def test_channels_last_needs_no_copy() -> None:
    x = TensorSpec((1, 16, 8, 8, 8), (8192, 1, 1024, 128, 16), torch.float32)
    options = ((1,) * 3, (1,) * 3, (1,) * 3, False, (0,) * 3, 1)
    call = Call("aten.convolution.default", (x, spec(16, 16, 3, 3, 3), None, *options))
    assert scratch_of(call, x, to_onednn=False) == 0
