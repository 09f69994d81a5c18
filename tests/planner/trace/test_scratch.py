"""What convolutions take while they run, against the C library's count (tier: processes)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hyperslab.planner.trace.records import Call, TensorSpec, contiguous_strides
from hyperslab.planner.trace.unbacked_memory import scratch_of

PROGRAM = """
import re, sys, torch
from hyperslab.comm.bootstrap import keep_freed_memory

def resident():
    status = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status).group(1)) << 10

keep_freed_memory()
torch.set_num_threads(1)
ones = [1] * 3
inp, out, side = map(int, sys.argv[1:4])

def run(x, w, y):
    if sys.argv[4] == "forward":
        return torch.ops.aten.convolution(x, w, None, ones, ones, ones, False, [0] * 3, 1)
    mask = [sys.argv[4] == "data", sys.argv[4] == "filter", False]
    options = (None, ones, ones, ones, False, [0] * 3, 1, mask)
    return torch.ops.aten.convolution_backward(y, x, w, *options)

def operands(inp, out, side):
    shape = (side,) * 3
    return torch.randn(1, inp, *shape), torch.randn(out, inp, 3, 3, 3), torch.randn(1, out, *shape)

run(*operands(16, 16, 40))
given = operands(inp, out, side)
before = resident()
result = run(*given)
own = sum(r.nbytes for r in (result if isinstance(result, tuple) else [result]) if r is not None)
print(resident() - before - own)
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
    return TensorSpec(shape, contiguous_strides(shape), torch.float32)


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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_what_the_process_takes(case: tuple[int, int, int, str]) -> None:
    words = list(map(str, case))
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == pytest.approx(predicted(*case), rel=0.25, abs=8 << 20)


def test_channels_last_needs_no_copy() -> None:
    x = TensorSpec((1, 16, 8, 8, 8), (8192, 1, 1024, 128, 16), torch.float32)
    options = ((1,) * 3, (1,) * 3, (1,) * 3, False, (0,) * 3, 1)
    call = Call("aten.convolution.default", (x, spec(16, 16, 3, 3, 3), None, *options))
    assert scratch_of(call, x, to_onednn=False) == 0
