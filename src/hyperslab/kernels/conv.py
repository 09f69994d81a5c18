"""Convolves one block, forward and backward, plain or transposed, without and with a graph.

[Note: passes] A convolution has three passes, and a transposed one the same three, in another
order::

                            convolution    transposed convolution
    forward                 "forward"      "input"
    gradient of its input   "input"        "forward"
    gradient of its weight  "weight"       "weight", the two volumes changing places

Each pass has several implementations (`conv_variants`), of which the `registry` chooses one by a
`Problem` (`conv_problem`): ``python -m hyperslab.kernels`` prints the rule.

In reading order: torch's own convolution, for all that is not computed in channels last on the
CPU; `guarded`, the way round what oneDNN (3.12) gets wrong; `dispatch`; the convolution and its
gradients, plain or transposed as its options say; what is saved of an input for the backward pass;
and `LocalConv`, the convolution with its graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.autograd.graph import Node

from hyperslab.kernels.conv_problem import (
    PROBLEMS,
    ConvOptions,
    Kernels,
    Problem,
    Task,
    aten_convolution,
    aten_gradients,
    in_channels_last,
    in_contiguous,
    kernel_exceeds_volume,
    no_view,
    problem_for,
)
from hyperslab.kernels.conv_variants import CONV_VARIANTS
from hyperslab.kernels.memory_format import (
    CHANNELS_LAST,
    HaloPaddedBuffer,
    channels_last_by_strides,
    dense,
)
from hyperslab.kernels.registry import conv_format, conv_variant, device_kind
from hyperslab.util.torch_internals import BlockFunction, processor_has_matrix_tiles

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Gradients of input, weight and bias; None where it was not asked for."""


def for_aten(
    x: torch.Tensor, weight: torch.Tensor, options: ConvOptions, kernels: Kernels
) -> tuple[torch.Tensor, ConvOptions]:
    """Returns input and options as torch's own operator takes them; differentiable."""
    x = in_preferred_format(x, weight, kernels)
    plain_on_cpu = options.output_padding is None and device_kind(x) == "cpu"
    if plain_on_cpu and kernel_exceeds_volume(weight.shape, x.shape, x.dtype):
        # See `Problem.outreaches`.
        return F.pad(x, options.margins), options.without_padding
    return x, options


def aten_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    options: ConvOptions,
    needs: Sequence[bool],
) -> Gradients:
    """Returns gradients of input, weight and bias, differentiable; None without ``needs``."""
    if x.dtype == torch.bfloat16 and device_kind(x) == "cpu" and processor_has_matrix_tiles():
        # Torch's own kernels are the library's, without `guarded` and the rule between.
        operands = gradient.float(), x.float(), weight.float()
        wide = aten_backward(*operands, options, needs)
        dx, dw, db = (None if one is None else one.to(x.dtype) for one in wide)
        return dx, dw, db
    plain_on_cpu = options.output_padding is None and device_kind(x) == "cpu"
    shapes = tuple(x.shape), tuple(weight.shape)
    if not plain_on_cpu or not problem_for("weight", *shapes, x.dtype, options).outreaches:
        return aten_gradients(gradient, x, weight, options, needs)
    margins = options.margins
    x = F.pad(x, margins)
    dx, dw, db = aten_gradients(gradient, x, weight, options.without_padding, needs)
    return None if dx is None else F.pad(dx, [-m for m in margins]), dw, db


def guarded(run: Callable[..., Any], problem: Problem, first: torch.Tensor, *others: Any) -> Any:
    """Returns the result of ``run``, or the same one by a way that oneDNN computes right."""
    if problem.has_lone_column:
        y = guarded(run, problem.in_steps_of_one, first, *others)
        return in_channels_last(y.narrow(-1, 0, 1))
    if problem.outreaches:
        margins = problem.options.margins
        if problem.task != "input":
            padded = in_channels_last(F.pad(first, margins))
            return guarded(run, problem.padded, padded, *others)
        padded = guarded(run, problem.padded, first, *others)
        return in_channels_last(F.pad(padded, [-margin for margin in margins]))
    if problem.skips_lines or problem.fills_tiles:
        weight, bias = others
        channel = [*[0, 0] * len(problem.kernel), 0, 1]
        x = F.pad(first.unflatten(1, (problem.options.groups, -1)), channel).flatten(1, 2)
        wider = in_channels_last(x), F.pad(weight, channel)
        return guarded(run, problem.with_empty_channel, *wider, bias)
    if problem.gaps:
        return guarded(run, problem.of_lines_read, problem.lines_read(first), *others)
    if problem.skips_voxels:
        read = first[:, :, *(slice(None, None, step) for step in problem.options.stride)]
        return guarded(run, problem.of_voxels_read, in_channels_last(read), *others)
    result = run(problem, first, *others)
    if problem.planes_beyond:
        _, bias = others
        beyond = result[:, :, -problem.planes_beyond :]
        if bias is None:
            beyond.zero_()
        else:
            beyond.copy_(bias.view(-1, *[1] * len(problem.kernel)))
    return result


def computes_last(x: torch.Tensor, weight: torch.Tensor, kernels: Kernels) -> bool:
    """Says if a convolution of ``x`` computes, and returns its result, in channels last."""
    return conv_format(x, weight, kernels) == "channels last"


def is_guarded_line(x: torch.Tensor, weight: torch.Tensor, kernels: Kernels) -> bool:
    """Says if a convolution of one dim is computed in two, by `guarded`: torch itself does that."""
    lines = x.dtype == torch.bfloat16 and x.dim() == 3 == weight.dim()
    return lines and computes_last(x.unsqueeze(2), weight.unsqueeze(2), kernels)


@functools.lru_cache(PROBLEMS)
def options_of_plane(options: ConvOptions) -> ConvOptions:
    """Returns the options of a convolution of one dim for planes of one row."""
    more = options.output_padding
    return ConvOptions(
        (1, *options.stride),
        (0, *options.padding),
        (1, *options.dilation),
        options.groups,
        None if more is None else (0, *more),
    )


def in_preferred_format(x: torch.Tensor, weight: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Returns ``x`` in the format that the device's own convolution prefers; differentiable."""
    if conv_format(x, weight, kernels) == "cudnn channels last":
        return channels_last_by_strides(x)
    return x


def dispatch(problem: Problem, *operands: Any) -> Any:
    """Runs a pass by the implementation that is chosen; the problem follows its ``operands``.

    Blocks are channels last, and so is the result.
    """
    if problem.needs_guard:
        return guarded(_run_variant, problem, *operands)
    return _run_variant(problem, *operands)


def _run_variant(problem: Problem, *operands: Any) -> Any:
    variant = CONV_VARIANTS[problem.task][conv_variant(problem)]
    more = (dispatch,) if variant.nested else ()
    return variant.run(*operands, problem, *more)


def conv_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    kernels: Kernels = "fixed",
) -> torch.Tensor:
    """Convolves a block, plain or transposed, without a graph."""
    task: Task = "forward" if options.output_padding is None else "input"
    problem = problem_of(task, x, weight, bias, options, kernels)
    if problem is None:
        if is_guarded_line(x, weight, kernels):
            plane = x.unsqueeze(2), weight.unsqueeze(2)
            y = conv_forward(*plane, bias, options_of_plane(options), kernels)
            return no_view(y.squeeze(2).contiguous())
        x, options = for_aten(x, weight, options, kernels)
        return aten_convolution(x, weight, bias, options)
    if bias is not None:
        bias = bias.contiguous()  # oneDNN by name reads it as if it were, a column too
    return no_view(dispatch(problem, in_channels_last(x), weight, bias))


def conv_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    options: ConvOptions,
    needs: Sequence[bool],
    kernels: Kernels = "fixed",
    taken: bool = False,
) -> Gradients:
    """Returns gradients of `conv_forward`: input, weight, bias; None where ``needs`` is false.

    Where a graph is recorded they are torch's own, which can be differentiated again. The gradient
    of a weight that was ``taken`` of a parameter, and is copied anyway, has any memory format.
    """
    problem = problem_of("weight", x, weight, None, options, kernels)
    differentiable = torch.is_grad_enabled()
    if problem is None and not differentiable and is_guarded_line(x, weight, kernels):
        g, plane, filters = (t.unsqueeze(2) for t in (gradient, x, weight))
        dx, dw, db = conv_backward(g, plane, filters, options_of_plane(options), needs, kernels)
        dx, dw = (None if one is None else one.squeeze(2).contiguous() for one in (dx, dw))
        return dx, dw if dw is None else as_one_channel(dw), db
    if problem is None or differentiable:
        gradient = in_preferred_format(gradient, weight, kernels)
        x = in_preferred_format(x, weight, kernels)
        dx, dw, db = aten_backward(gradient, x, weight, options, needs)
        return dx, dw if dw is None else as_one_channel(dw), db
    plain = options.output_padding is None
    g = in_channels_last(gradient)
    dx = None
    dw = None
    db = None
    if needs[0]:
        dx = dispatch(problem.of("input" if plain else "forward"), g, weight, None)
    if needs[1]:
        last = in_channels_last(x)
        # A transposed convolution reads what the plain one writes; its bias is another sum.
        volumes = (last, g) if plain else (g, last)
        dw, db = dispatch(problem, *volumes, weight, plain and needs[2])
        if weight.is_leaf and weight.is_contiguous() and not taken:
            dw = as_one_channel(in_contiguous(dw))  # or autograd would copy it so
    if needs[2] and db is None:
        db = torch.ops.hyperslab.channel_sums(g, 0)[0].to(g.dtype)  # added up in float64
    return dx, dw, db


def as_one_channel(weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight of one channel, or its gradient, with the strides that a parameter has.

    The gradient lies in memory as it should, and yet DistributedDataParallel would warn of its
    strides and copy it. Differentiable: the gradient gets them, too.
    """
    return weight.squeeze(1).unsqueeze(1) if weight.shape[1] == 1 else weight


def problem_of(
    task: Task,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    kernels: Kernels,
) -> Problem | None:
    """Describes the pass in channels last; None: leave it, or the error in it, to torch."""
    if not computes_last(x, weight, kernels):
        return None
    added = None if bias is None else (bias.dtype, bias.shape)
    return _known_problem(task, x.shape, weight.shape, x.dtype, added, options)


@functools.lru_cache(PROBLEMS)
def _known_problem(
    task: Task,
    x: torch.Size,
    weight: torch.Size,
    dtype: torch.dtype,
    bias: tuple[torch.dtype, torch.Size] | None,
    options: ConvOptions,
) -> Problem | None:
    """Describes a pass by the shapes of its operands; None where they do not fit each other."""
    fit = len(x) == len(weight) == len(options.padding) + 2 and 0 not in x and 0 not in weight
    if not fit or weight[0] % options.groups:
        return None
    channels = weight[0], weight[1] * options.groups
    made, read = channels if options.output_padding is None else channels[::-1]
    if x[1] != read or bias not in (None, (dtype, (made,))):
        return None
    if options.output_padding is None:
        problem = problem_for(task, x, weight, dtype, options)
        return problem if min(problem.y[2:]) > 0 else None
    steps = zip(x[2:], weight[2:], *options[:3], options.output_padding, strict=True)
    extents = [(e - 1) * s - 2 * p + d * (k - 1) + 1 + more for e, k, s, p, d, more in steps]
    if min(extents) < 1:
        return None
    # It is the gradient of a plain convolution.
    plain = options._replace(output_padding=None)
    volume = torch.Size((x[0], made, *extents))
    problem = problem_for(task, volume, weight, dtype, plain)
    return problem if problem.y == x else None  # more output padding than stride


SavedTensors = tuple[torch.Tensor | None, ...]
"""Tensors that autograd takes and returns."""


class RecomputedInput(Protocol):
    """Computes an input again in the backward pass, so that it need not be kept.

    ``tensors`` are kept in its place, as autograd keeps tensors. ``value`` makes the input of them:
    bit by bit what it was, in any memory format. Where a graph is recorded
    (``torch.is_grad_enabled()``: with ``create_graph=True``) it does so out of operators that can
    be differentiated, for the tensors then have their history.
    """

    @property
    def tensors(self) -> SavedTensors:
        """Returns the tensors from which the input is computed."""

    def value(self, tensors: SavedTensors, padded: HaloPaddedBuffer | None = None) -> torch.Tensor:
        """Computes the input; in ``padded``, if there is any and no graph."""


def saved_input(
    x: torch.Tensor, source: RecomputedInput | None
) -> tuple[SavedTensors, Callable[..., torch.Tensor]]:
    """Returns what to save of an input, and the way back; without a source the input itself."""
    return ((x,), _only_tensor) if source is None else (source.tensors, source.value)


def _only_tensor(tensors: Sequence[torch.Tensor], _: object = None) -> torch.Tensor:
    return tensors[0]


class TakenWeight(Protocol):
    """Makes the weight of a convolution from a parameter, in the convolution's node of the graph.

    A node of its own costs autograd some 40 µs in a network, where no cache holds its code by then.
    """

    def take(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the weight, without a graph."""

    def gradient(
        self, parameter: torch.Tensor, gradient: torch.Tensor, accumulating: Node
    ) -> torch.Tensor:
        """Returns the parameter's gradient from the weight's.

        ``accumulating`` is the node that accumulates it.
        """

    def gradient_with_graph(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the same out of operators that can be differentiated."""


class _TakenBefore(BlockFunction):
    """Gives a weight that was taken of a parameter its history.

    The parameter may have been changed since: what is taken of it now may be another weight.
    """

    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, weight: torch.Tensor, taken: TakenWeight
    ) -> torch.Tensor:
        ctx.parameter = parameter  # a leaf: it keeps no graph
        ctx.taken = taken
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.taken.gradient_with_graph(ctx.parameter, gradient), None, None


def take_weight(ctx: Any, weight: torch.Tensor, taken: TakenWeight | None) -> torch.Tensor:
    """Returns the weight of a convolution that is given one, or a parameter; for a forward pass."""
    ctx.taken = taken
    if taken is None:
        return weight
    ctx.parameter = weight  # a leaf: it keeps no graph
    return taken.take(weight)


def weight_with_graph(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
    """Returns the saved weight of a convolution with its graph, for a backward pass."""
    if ctx.taken is None:
        return weight
    with_history: torch.Tensor = _TakenBefore.apply(ctx.parameter, weight, ctx.taken)
    return with_history


def gradient_of_taken(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the gradient of what `take_weight` was given; the second operand of its node."""
    if ctx.taken is None or gradient is None:
        return gradient
    if torch.is_grad_enabled():
        return ctx.taken.gradient_with_graph(ctx.parameter, gradient)
    _, (accumulating, _), *_ = ctx.next_functions
    return ctx.taken.gradient(ctx.parameter, gradient, accumulating)


class LocalConv(BlockFunction):
    """Runs a convolution of a block, plain or transposed, with a graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: ConvOptions,
        kernels: Kernels,
        source: RecomputedInput | None,
        taken: TakenWeight | None = None,
    ) -> torch.Tensor:
        weight = take_weight(ctx, weight, taken)
        kept, ctx.value = saved_input(x, source)
        ctx.options = options
        ctx.kernels = kernels
        ctx.has_bias = bias is not None
        ctx.save_for_backward(weight, *kept)
        return conv_forward(x, weight, bias, options, kernels)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        needs = [*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2]]
        x = ctx.value(tuple(kept))
        if torch.is_grad_enabled():
            weight = weight_with_graph(ctx, weight)
        how = (ctx.options, needs, ctx.kernels, ctx.taken is not None)
        dx, dw, db = conv_backward(gradient, x, weight, *how)
        return dx, gradient_of_taken(ctx, dw), db, *[None] * 4


def convolve_by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    kernels: Kernels,
) -> torch.Tensor:
    """Convolves by torch's own operator with its own graph, plain or transposed."""
    x, options = for_aten(x, weight, options, kernels)
    return aten_convolution(x, as_one_channel(weight), bias, options)


def differentiable_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    margins: Sequence[int] = (),
    kernels: Kernels = "fixed",
    source: RecomputedInput | None = None,
    taken: TakenWeight | None = None,
) -> torch.Tensor:
    """Convolves a block with its graph.

    ``margins``: more padding, as ``F.pad`` takes it; ``source``: what ``x`` can be computed from
    again; ``taken``: what makes the weight of a parameter, without margins and in channels last.
    """
    if margins:
        x = conv_input(F.pad(x, margins), weight, kernels)
        source = None
    by_torch = taken is None and not computes_last(x, weight, kernels)
    if by_torch and not is_guarded_line(x, weight, kernels):
        return convolve_by_torch(x, weight, bias, options, kernels)
    return LocalConv.apply(x, weight, bias, options, kernels, source, taken)


def conv_input(
    x: torch.Tensor,
    weight: torch.Tensor,
    kernels: Kernels,
    dtype: torch.dtype | None = None,
    padded: HaloPaddedBuffer | None = None,
) -> torch.Tensor:
    """Converts a block to ``dtype``, and a network's input to the format in which it is convolved.

    The convolution keeps what it is given, so that the input need not be converted once more in
    the backward pass; with ``padded`` it is made there, if it may be. What has a gradient is left
    in its format: the code that made it may keep it as well.
    """
    dtype = dtype or x.dtype
    if x.requires_grad:
        return x if x.dtype == dtype else x.to(dtype)
    if not computes_last(x[:0].to(dtype), weight, kernels):
        return in_preferred_format(x.to(dtype), weight, kernels)
    return input_in_channels_last(x, dtype, padded)


def input_in_channels_last(
    x: torch.Tensor, dtype: torch.dtype, padded: HaloPaddedBuffer | None = None
) -> torch.Tensor:
    """Converts a block as `conv_input` does where a convolution computes in channels last."""
    if x.requires_grad:
        return x if x.dtype == dtype else x.to(dtype)
    last = CHANNELS_LAST[x.dim()]
    if x.dtype == dtype and x.is_contiguous(memory_format=last):
        return dense(x, last)
    y = None if padded is None else padded.block(x.shape, dtype, last)
    if y is None:
        return torch.ops.hyperslab.reorder(x, True, dtype)
    torch.ops.hyperslab.reorder_into(x, y)
    return y
