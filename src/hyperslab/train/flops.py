"""Counts the floating-point operations of a step, and compares their rate with the peak."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyperslab.comm.agreement import all_gather
from hyperslab.kernels import conv_in_c  # noqa: F401 - declares its operators
from hyperslab.train.step import PRECISIONS, float32_products
from hyperslab.util.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    graph_task,
    onednn_transposed_convolution,
    tree_map_only,
)

_aten = torch.ops.aten


def _fft_flops(whole: Any, dims: Sequence[int], each: float) -> int:
    """Count 5 n log2 n for a complex row of n, half for a real one, as is usual for FFTs."""
    length = math.prod(whole[dim] for dim in dims)
    return round(each * math.prod(whole) * math.log2(max(1, length)))


WEIGHT_GRADIENTS = (
    torch.ops.hyperslab.direct_convolution_gradient,
    torch.ops.hyperslab.winograd_gradient,
    torch.ops.hyperslab.depthwise_gradient,
)
"""The library's own operators that compute the gradient of a convolution's weight."""


@functools.cache
def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Return a formula for each operator that does work: torch's, and ours where it has none."""
    # Torch's counter imports triton, for which only a run that counts should wait.
    from torch.utils.flop_counter import conv_flop_count, flop_registry

    def convolution(x: Any, weight: Any, *_: Any, out_val: Any) -> int:
        # A gradient larger than what it is made of is a convolution with the kernel turned round,
        # whose windows reach over the edge: what was asked for is the transposed one.
        grows = math.prod(out_val[2:]) > math.prod(x[2:])
        return conv_flop_count(x, weight, out_val, transposed=grows and graph_task() != -1)

    def transposed_convolution(x: Any, weight: Any, *_: Any, out_val: Any) -> int:
        return conv_flop_count(x, weight, out_val, transposed=True)

    def weight_gradient(x: Any, gradient: Any, *_: Any, out_val: Any) -> int:
        # By Winograd's filtering, too, those of a plain convolution: they are what was asked for.
        return conv_flop_count(x, out_val[0], gradient)

    def depthwise_gradient(x: Any, gradient: Any, *_: Any, out_val: Any) -> int:
        # Torch counts this gradient as one of all pairs of channels, and so do we.
        def swapped(shape: Any) -> list[int]:
            return [shape[1], shape[0], *shape[2:]]

        return conv_flop_count(swapped(x), swapped(gradient), swapped(out_val))

    return {
        **flop_registry,
        _aten._fft_c2c: lambda x, dims, *_, out_val: _fft_flops(x, dims, 5),
        _aten._fft_r2c: lambda x, dims, *_, out_val: _fft_flops(x, dims, 2.5),
        _aten._fft_c2r: lambda x, dims, *_, out_val: _fft_flops(out_val, dims, 2.5),
        _aten.mkldnn_convolution: convolution,
        onednn_transposed_convolution(): transposed_convolution,
        torch.ops.hyperslab.direct_convolution: convolution,
        **dict.fromkeys(WEIGHT_GRADIENTS, weight_gradient),
        torch.ops.hyperslab.depthwise_gradient: depthwise_gradient,
    }


class FlopCount(TorchDispatchMode):
    """Counts the flops of convolutions and matrix products within it, by torch's formulas.

    A multiplication and an addition are two. ``flops`` is None once something ran that cannot be
    counted: training goes on without.
    """

    supports_higher_order_operators = True  # or torch refuses to run them here

    def __init__(self) -> None:
        super().__init__()
        self.flops: int | None = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        if self.flops is not None:
            more = _flops_of_call(operator, args, kwargs or {}, result)
            self.flops = None if more is None else self.flops + more
        return result


def _flops_of_call(operator: Any, args: Any, options: Any, result: Any) -> int | None:
    if not isinstance(operator, OpOverload):
        return None  # it runs operators of its own, out of sight
    formula = flop_formulas().get(operator.overloadpacket)
    if formula is None:
        return 0
    values = (args, options, result)
    taken, given, out = tree_map_only(torch.Tensor, lambda tensor: tensor.shape, values)
    try:
        return int(formula(*taken, **given, out_val=out))
    except Exception:  # a stranger's formula, or a use that the formula does not foresee
        return None


class StepFlops:
    """Holds the work of all ranks in a step [flop], counted in the first, and their peak [flop/s].

    ``peak`` is one rank's, where it is known. ``per_sample`` stays None where a rank could not
    count.
    """

    def __init__(self, ranks: int, peak: float | None) -> None:
        self.peak = None if peak is None else peak * ranks
        self.per_sample: float | None = None
        self.wanted = True

    def counted(self, mine: int | None, samples: int) -> None:
        """Take this rank's work ``mine`` in a step of so many samples; all ranks call it."""
        self.wanted = False
        counts = all_gather(mine)
        if None not in counts:
            self.per_sample = sum(filter(None, counts)) / samples

    def measured(self, mine: float) -> None:
        """Take this rank's peak ``mine``; all ranks call it."""
        self.peak = sum(all_gather(mine))

    def speed(self, samples: int, seconds: float) -> float | None:
        """Return the rate of a step [flop/s], all ranks together."""
        return None if self.per_sample is None else self.per_sample * samples / seconds

    def share(self, speed: float | None) -> float | None:
        return None if self.peak is None or speed is None else speed / self.peak


PEAK_EXTENTS = (128, 8192)  # of the matrices of which the product is timed, at least and most
LONG_PRODUCT = 0.01  # [s] of a product that is large enough


def measure_peak(device: torch.device, precision: str) -> float:
    """Measure this rank's best rate [flop/s] in products of matrices of the precision.

    They grow until they are large enough: where a processor has no instructions for bfloat16, a
    product takes a hundred times that of float32. All ranks measure at once: they share the
    machine's memory and its clock.
    """
    size, most = PEAK_EXTENTS
    kind = PRECISIONS[precision] or torch.float32
    with float32_products(precision):
        while True:
            a = torch.ones(size, size, device=device, dtype=kind)
            product = torch.empty_like(a)
            seconds = []
            for _ in range(12):
                began = time.perf_counter()
                torch.mm(a, a, out=product)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - began)
            if min(seconds) >= LONG_PRODUCT or size >= most:
                return 2 * size**3 / min(seconds)
            size *= 2
