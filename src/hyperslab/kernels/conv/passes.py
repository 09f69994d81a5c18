"""Runs the passes of a convolution of one block, plain or transposed, without and with a graph.

In reading order: `dispatch` runs a pass by the variant that is chosen for it; the convolution
and its gradients; the transposed convolution, which is the same passes in another order (see
the package); what is saved of an input for the backward pass (`RecomputedInput`: it is computed
again); and `LocalConv`, the convolution with its graph, for blocks that are not cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from hyperslab.kernels.conv.aten_conv import (
    Gradients,
    aten_backward,
    aten_forward,
    aten_transposed,
    aten_transposed_backward,
    differentiable_aten_conv,
    guarded,
)
from hyperslab.kernels.conv.autotune import autotuner, is_autotuned
from hyperslab.kernels.conv.problem import (
    ConvOptions,
    Kernels,
    Problem,
    Task,
    computes_last,
    in_channels_last,
    in_contiguous,
    in_preferred_format,
    no_view,
    problem_for,
)
from hyperslab.kernels.conv.variants import CONV_VARIANTS, variant_by_rule
from hyperslab.kernels.memory_format import CHANNELS_LAST, HaloPaddedBuffer, dense


def dispatch(problem: Problem, kernels: Kernels, *operands: Any) -> Any:
    """The result of a pass; ``operands`` are what its variants take before the problem.

    Blocks are channels last, and so is the result.
    """

    def run(problem: Problem, *operands: Any) -> Any:
        variants = CONV_VARIANTS[problem.task]
        if kernels != "measure" or not is_autotuned(problem):
            return variants[variant_by_rule(problem)].run(*operands, problem)
        known = autotuner(torch.get_num_threads())
        name = known.name(problem, lambda name: variants[name].run(*operands, problem))
        return variants[name].run(*operands, problem)

    return guarded(run, problem, *operands)


def conv_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
    kernels: Kernels = "fixed",
) -> torch.Tensor:
    """The convolution of a block, without a graph."""
    problem = problem_of("forward", x, weight, bias, options, padding, kernels)
    if problem is None:
        return aten_forward(in_preferred_format(x, weight, kernels), weight, bias, options, padding)
    return no_view(dispatch(problem, kernels, in_channels_last(x), weight, bias))


def conv_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    options: ConvOptions,
    padding: Sequence[int],
    needs: Sequence[bool],
    kernels: Kernels = "fixed",
) -> Gradients:
    """Gradients of input, weight and bias of `conv_forward`; None where ``needs`` is false.

    Where a graph is recorded they are torch's own, which can be differentiated again.
    """
    problem = problem_of("weight", x, weight, None, options, padding, kernels)
    if problem is None or torch.is_grad_enabled():
        gradient = in_preferred_format(gradient, weight, kernels)
        x = in_preferred_format(x, weight, kernels)
        return aten_backward(gradient, x, weight, options, padding, needs)
    g = in_channels_last(gradient)
    dx = None
    dw = None
    db = None
    if needs[0]:
        dx = dispatch(problem.of("input"), kernels, g, weight, None)
    if needs[1]:
        dw, db = dispatch(problem, kernels, in_channels_last(x), g, weight, needs[2])
        if weight.is_leaf and weight.is_contiguous():
            dw = in_contiguous(dw)  # or autograd would copy it so
    elif needs[2]:
        db = sum_over_space(g)
    return dx, dw, db


def sum_over_space(g: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias; added up in float64."""
    return torch.ops.hyperslab.channel_sums(g, 0)[0].to(g.dtype)


def problem_of(
    task: Task,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
    kernels: Kernels,
) -> Problem | None:
    """What is to be computed in channels last; None: leave it, or the error in it, to torch."""
    fits = (
        computes_last(x, weight, kernels)
        and x.dim() == weight.dim() == len(padding) + 2
        and 0 not in x.shape
        and 0 not in weight.shape
        and x.shape[1] == weight.shape[1] * options.groups
        and weight.shape[0] % options.groups == 0
        and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1]))
    )
    if not fits:
        return None
    problem = problem_for(task, x.shape, weight.shape, x.dtype, options, tuple(padding))
    return problem if min(problem.y[2:]) > 0 else None


def transposed_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
    extra: Sequence[int],
    kernels: Kernels = "fixed",
) -> torch.Tensor:
    """The transposed convolution of a block, without a graph; ``extra`` is its output padding."""
    problem = _transposed_problem(x, weight, bias, options, padding, extra, kernels)
    if problem is None:
        x = in_preferred_format(x, weight, kernels)
        return aten_transposed(x, weight, bias, options, padding, extra)
    return no_view(dispatch(problem, kernels, in_channels_last(x), weight, bias))


def transposed_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    options: ConvOptions,
    padding: Sequence[int],
    extra: Sequence[int],
    needs: Sequence[bool],
    kernels: Kernels = "fixed",
) -> Gradients:
    """Gradients of input, weight and bias; None where ``needs`` is false.

    Where a graph is recorded they are torch's own, which can be differentiated again.
    """
    problem = _transposed_problem(x, weight, None, options, padding, extra, kernels)
    if problem is None or torch.is_grad_enabled():
        gradient = in_preferred_format(gradient, weight, kernels)
        x = in_preferred_format(x, weight, kernels)
        return aten_transposed_backward(gradient, x, weight, options, padding, extra, needs)
    g = in_channels_last(gradient)
    dx = dispatch(problem.of("forward"), kernels, g, weight, None) if needs[0] else None
    dw = None
    if needs[1]:
        coarse = in_channels_last(x)
        dw, _ = dispatch(problem.of("weight"), kernels, g, coarse, weight, False)
    return dx, dw, sum_over_space(g) if needs[2] else None


def _transposed_problem(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
    extra: Sequence[int],
    kernels: Kernels,
) -> Problem | None:
    """What is to be computed in channels last; None: leave it, or the error in it, to torch."""
    fits = (
        computes_last(x, weight, kernels)
        and x.dim() == weight.dim() == len(padding) + 2
        and 0 not in x.shape
        and 0 not in weight.shape
        and x.shape[1] == weight.shape[0]
        and weight.shape[0] % options.groups == 0
        and (
            bias is None
            or (bias.dtype == x.dtype and len(bias) == weight.shape[1] * options.groups)
        )
    )
    if not fits:
        return None
    steps = zip(
        x.shape[2:], weight.shape[2:], options.stride, padding, options.dilation, extra, strict=True
    )
    extents = [(e - 1) * s - 2 * p + d * (k - 1) + 1 + more for e, k, s, p, d, more in steps]
    made = torch.Size([len(x), weight.shape[1] * options.groups, *extents])
    if min(extents) < 1:
        return None
    problem = problem_for("input", made, weight.shape, x.dtype, options, tuple(padding))
    return problem if problem.y == x.shape else None  # more output padding than stride


SavedTensors = tuple[torch.Tensor | None, ...]
"""As autograd takes and returns them."""


class RecomputedInput(Protocol):
    """An input that is computed again in the backward pass, so that it need not be kept.

    ``tensors`` are kept in its place, as autograd keeps tensors. ``value`` makes the input of them:
    bit by bit what it was, in any memory format. Where a graph is recorded
    (``torch.is_grad_enabled()``: with ``create_graph=True``) it does so out of operators that can
    be differentiated, for the tensors then have their history.
    """

    @property
    def tensors(self) -> SavedTensors:
        """What the input is computed from."""

    def value(self, tensors: SavedTensors, room: HaloPaddedBuffer | None = None) -> torch.Tensor:
        """The input; where there is ``room``, without a graph alone, if it may be made there."""


class SavedInput:
    """What to save of an input, and the way back; ``source`` None: the input itself."""

    def __init__(self, x: torch.Tensor, source: RecomputedInput | None) -> None:
        self.tensors: SavedTensors = (x,) if source is None else source.tensors
        self.value = _only_tensor if source is None else source.value


def _only_tensor(tensors: SavedTensors, room: HaloPaddedBuffer | None = None) -> torch.Tensor:
    (x,) = tensors
    assert x is not None
    return x


class Passes(Protocol):
    """A convolution or a transposed one of a block, without a graph."""

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Kernels,
    ) -> torch.Tensor:
        """What it makes of the block."""

    def backward(
        self,
        gradient: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        needs: Sequence[bool],
        kernels: Kernels,
    ) -> Gradients:
        """Gradients of block, weight and bias; None where ``needs`` is false.

        Where a graph is recorded they can be differentiated again.
        """


@dataclass(frozen=True, slots=True)
class ConvPasses:
    """A convolution with its options and its padding."""

    options: ConvOptions
    padding: tuple[int, ...]

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Kernels,
    ) -> torch.Tensor:
        """As `Passes.forward`."""
        return conv_forward(x, weight, bias, self.options, self.padding, kernels)

    def backward(
        self,
        gradient: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        needs: Sequence[bool],
        kernels: Kernels,
    ) -> Gradients:
        """As `Passes.backward`."""
        return conv_backward(gradient, x, weight, self.options, self.padding, needs, kernels)


class LocalConv(torch.autograd.Function):
    """`Passes` with a graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        passes: Passes,
        kernels: Kernels,
        source: RecomputedInput | None,
    ) -> torch.Tensor:
        kept = SavedInput(x, source)
        ctx.value = kept.value
        ctx.passes = passes
        ctx.kernels = kernels
        ctx.has_bias = bias is not None
        ctx.save_for_backward(weight, *kept.tensors)
        return passes.forward(x, weight, bias, kernels)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        needs = [*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2]]
        x = ctx.value(tuple(kept))
        return *ctx.passes.backward(gradient, x, weight, needs, ctx.kernels), None, None, None


def differentiable_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
    margins: Sequence[int] = (),
    kernels: Kernels = "fixed",
    source: RecomputedInput | None = None,
) -> torch.Tensor:
    """The convolution of a block with its graph.

    ``margins``: more padding, as ``F.pad`` takes it; ``source``: what ``x`` can be computed from
    again.
    """
    if margins:
        x = F.pad(x, margins)
        source = None
    if not computes_last(x, weight, kernels):
        x = in_preferred_format(x, weight, kernels)
        return differentiable_aten_conv(x, weight, bias, options, padding)
    x = conv_input(x, weight, kernels)
    return LocalConv.apply(x, weight, bias, ConvPasses(options, tuple(padding)), kernels, source)


def conv_input(
    x: torch.Tensor,
    weight: torch.Tensor,
    kernels: Kernels,
    dtype: torch.dtype | None = None,
    room: HaloPaddedBuffer | None = None,
) -> torch.Tensor:
    """A block in ``dtype``; a network's input also in the format in which it is convolved.

    The convolution keeps what it is given, so that the input need not be converted once more in
    the backward pass; with ``room`` it is made there, if it may be. What has a gradient is left in
    its format: whoever made it may keep it as well.
    """
    dtype = dtype or x.dtype
    if x.requires_grad:
        return x.to(dtype)
    if not computes_last(x[:0].to(dtype), weight, kernels):
        return in_preferred_format(x.to(dtype), weight, kernels)
    last = CHANNELS_LAST[x.dim()]
    if x.dtype == dtype and x.is_contiguous(memory_format=last):
        return dense(x, last)
    y = None if room is None else room.block(x.shape, dtype, last)
    if y is None:
        return torch.ops.hyperslab.reorder(x, True, dtype)
    torch.ops.hyperslab.reorder_into(x, y)
    return y
