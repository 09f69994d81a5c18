"""``torch.autograd.grad`` of cut tensors, for gradient penalties and saliency."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.comm import Grid, all_reduce_sum
from hyperslab.ops.elementwise.pointwise import apply_pointwise
from hyperslab.ops.reductions.sums import sum
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import refuse


@register(torch.autograd.grad, family="autograd")
def grad(
    outputs: torch.Tensor | Sequence[torch.Tensor],
    inputs: torch.Tensor | Sequence[torch.Tensor],
    grad_outputs: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """The serial gradient, cut like its input; may be differentiated again (create_graph).

    Distribution scheme: 1. the one global number whose gradient it is: the sum of the outputs,
    weighted by ``grad_outputs``, 2. the backward pass, which differentiates the sum of the ranks'
    equal numbers, 3. a gradient is divided by the ranks, after adding up equal copies' parts.
    """
    sequence = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
    wanted = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    cut = [t for t in (*sequence, *wanted) if isinstance(t, Sharded)]
    if (
        is_grads_batched
        or not only_inputs
        or not all(isinstance(t, torch.Tensor) for t in (*sequence, *wanted))
    ):
        raise refuse(torch.autograd.grad, (sequence, wanted), {})
    for tensor in wanted:
        if isinstance(tensor, Sharded):
            tensor.check_on_path("torch.autograd.grad")
    with torch.enable_grad():
        total = _total(sequence, grad_outputs)
    found = torch.autograd.grad(
        total,
        wanted,
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=allow_unused,
        materialize_grads=materialize_grads,
    )
    with torch.set_grad_enabled(create_graph):
        pairs = zip(wanted, found, strict=True)
        return tuple(None if g is None else _serial(x, g, cut[0].grid) for x, g in pairs)


def _total(
    outputs: Sequence[torch.Tensor],
    weights: torch.Tensor | Sequence[torch.Tensor | None] | None,
) -> torch.Tensor:
    """The number, equal on all ranks, whose gradient is asked for."""
    if weights is None or isinstance(weights, torch.Tensor):
        weights = (weights,) * len(outputs)
    total = torch.zeros(())
    for output, weight in zip(outputs, weights, strict=True):
        if weight is None and output.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        if weight is not None and weight.shape != output.shape:
            raise RuntimeError(
                f"the global shapes of an output {tuple(output.shape)} and of its grad_outputs "
                f"{tuple(weight.shape)} differ"
            )
        total = total + _dot(output, weight)
    return total


def _dot(output: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    product = output
    if weight is not None and (isinstance(output, Sharded) or isinstance(weight, Sharded)):
        product = apply_pointwise(torch.mul, (output, weight), {})
    elif weight is not None:
        product = output * weight
    return sum(product) if isinstance(product, Sharded) else product.sum()


def _serial(x: torch.Tensor, gradient: torch.Tensor, grid: Grid) -> torch.Tensor:
    if isinstance(x, Sharded):
        return x.serial_gradient(gradient)
    group = grid.group(tuple(grid.extents))
    return all_reduce_sum(gradient, group, "the gradient of an ordinary tensor") / grid.size
