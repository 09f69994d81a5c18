"""Chains, forward and backward, by the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused import chain_backward as backward
from hyperslab.ops.kernels.fused import chain_forward as forward
from hyperslab.ops.kernels.fused.compiled.library import Library, call, library
from hyperslab.ops.kernels.fused.compiled.plans import POINTERS, ChainPlan, chain_plan
from hyperslab.ops.kernels.fused.compiled.tensors import address, ready, ready_numbers
from hyperslab.ops.kernels.fused.layout import extents_of


def compiled_chain_forward(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    mark: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the schema."""
    functions = library()
    plan = _forward_plan(x, norm, slope, pool, maximum, dtype)
    if functions is None or plan is None:
        return forward.reference(x, norm, slope, pool, maximum, mark, dtype)
    y = torch.empty_strided(plan.result, plan.result_strides, dtype=dtype)
    return y, _run_forward(functions, plan, x, norm, mark, y)


def compiled_chain_forward_into(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    mark: bool,
    y: torch.Tensor,
) -> torch.Tensor:
    """See the schema."""
    functions = library()
    plan = _forward_plan(x, norm, slope, pool, maximum, y.dtype)
    dense = plan is not None and (y.shape, y.stride()) == (plan.result, plan.result_strides)
    if functions is None or plan is None or not dense:
        return forward.forward_into(x, norm, slope, pool, maximum, mark, y)
    return _run_forward(functions, plan, x, norm, mark, y)


def _forward_plan(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    dtype: torch.dtype,
) -> ChainPlan | None:
    return chain_plan(
        x.shape,
        (x.shape, x.stride()),
        (x.dtype, None, dtype),
        tuple(pool),
        maximum,
        slope,
        extents_of(norm),
    )


def _run_forward(
    functions: Library,
    plan: ChainPlan,
    x: torch.Tensor,
    norm: torch.Tensor | None,
    mark: bool,
    y: torch.Tensor,
) -> torch.Tensor:
    """Fill ``y``, which is dense; the marks."""
    x = ready(x, plan.memory_format)
    norm = ready_numbers(norm)
    bits = plan.bits if mark else 0
    winners = plan.winners if mark else 0
    new = torch.zeros if bits else torch.empty  # rows that share a byte add their bits to it
    marks = new(bits + winners, dtype=torch.uint8)
    pointers = POINTERS.pack(
        x.data_ptr(),
        0,
        y.data_ptr(),
        marks.data_ptr() if bits else 0,
        marks.data_ptr() + bits if winners else 0,
        address(norm),
        0,
        0,
    )
    call(functions.forward, pointers + plan.numbers, plan.size)
    return marks


def compiled_chain_backward(
    g: torch.Tensor,
    marks: torch.Tensor,
    x: torch.Tensor | None,
    norm: torch.Tensor | None,
    through: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """See the schema."""
    functions = library()
    told = g if x is None else x
    plan = chain_plan(
        tuple(shape),
        (told.shape, told.stride()),
        (None if x is None else x.dtype, g.dtype, dtype),
        tuple(pool),
        maximum,
        slope,
        extents_of(norm),
        extents_of(through),
    )
    reads = norm is not None and (slope != 1 or through is not None)
    if functions is None or plan is None or (reads and x is None):
        return backward.reference(g, marks, x, norm, through, slope, pool, maximum, shape, dtype)
    plan.check(g, marks)
    g = ready(g, plan.memory_format)
    if x is not None:
        x = ready(x, plan.memory_format) if reads else None
    norm = ready_numbers(norm)
    through = ready_numbers(through)
    dx = torch.empty_strided(tuple(shape), plan.strides, dtype=dtype)
    pointers = POINTERS.pack(
        address(x),
        g.data_ptr(),
        dx.data_ptr(),
        marks.data_ptr() if plan.bits else 0,
        marks.data_ptr() + plan.bits,
        address(norm),
        address(through),
        0,
    )
    call(functions.backward, pointers + plan.numbers, plan.size)
    return dx
