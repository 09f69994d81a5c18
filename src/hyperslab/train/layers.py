"""Measures what the layers of a network say in a step, and how large their gradients are.

A *layer* is a module that has a weight of two dims or more and holds no other modules:
convolutions and dense layers, not normalisations. After a step's backward pass the forward pass
runs once more, with hooks and without gradients: the step itself sees no hook, so that its numbers
and what is deferred, tiled, recomputed or offloaded in it stay the same.

Legend: N samples, C channels of a map or features of a dense layer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from hyperslab.geometry import Partition
from hyperslab.ops.reductions import sum_over_ranks
from hyperslab.ops.slabs import SlabEpilogue
from hyperslab.tensor import Sharded
from hyperslab.train.history import LAYER_COLUMNS, LayerRow
from hyperslab.train.network import buffers_kept
from hyperslab.util.torch_internals import without_dispatch_modes

FEATURES_LAST = (nn.Linear, nn.Embedding)  # of all others channels are the second dim

RandomStates = Sequence[tuple[Callable[[Any], object], Any]]
"""Holds random states, and what puts each back."""


def random_states(device: torch.device) -> RandomStates:
    """Return the states of the global random generators that a network may draw from."""
    states: list[tuple[Callable[[Any], object], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),  # noqa: NPY002 - that of others' code
    ]
    if device.type == "cuda":
        put = partial(torch.cuda.set_rng_state, device=device)
        states.append((put, torch.cuda.get_rng_state(device)))
    return states


@contextmanager
def repeating(model: nn.Module, device: torch.device, states: RandomStates) -> Iterator[None]:
    """Run a network once more as it ran from these random ``states``, and leave no trace of it.

    Buffers and random states are put back; modes, such as a count of flops, do not see it.
    """
    now = random_states(device)
    with buffers_kept(model), without_dispatch_modes(), torch.no_grad():
        try:
            for put, state in states:
                put(state)
            yield
        finally:
            for put, state in now:
                put(state)


def layer_rows(model: nn.Module, run: Callable[[], object], scale: float = 1.0) -> list[LayerRow]:
    """Measure the layers of a network in ``run``, its forward pass, in the order of their calls.

    Those that are not called, or do not return one tensor of floating-point numbers, come last. The
    gradients, which are there already, are divided by ``scale``. All ranks call it together.
    """
    layers = {name or type(part).__name__: part for name, part in _layers_of(model)}
    found: list[tuple[str, list[torch.Tensor]]] = []

    def note(name: str, part: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point() and output.dim() > 1:
            features = output.dim() - 1 if isinstance(part, FEATURES_LAST) else 1
            found.append((name, _summary(*_moments_by_sample(output, features))))

    hooks = [part.register_forward_hook(partial(note, name)) for name, part in layers.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    called = {name for name, _ in found}
    found += [(name, []) for name in layers if name not in called]
    rows: list[LayerRow] = []
    for name, measured in found:
        use = sum(row["layer"] == name for row in rows) + 1
        values = [None if value.isnan() else value.item() for value in measured] or [None] * 3
        values += _norms(layers[name], scale)
        rows.append(dict(zip(LAYER_COLUMNS[1:], (name, use, *values), strict=True)))
    return rows


def common_share(rows: torch.Tensor) -> torch.Tensor:
    """Compute the share of the energy of rows (N, C) that belongs to their mean, without its noise.

    The mean of N rows has 1 / N of the energy of what differs between them. Of one row it is NaN:
    nothing tells it from others.
    """
    if len(rows) < 2:
        return rows.new_full((), math.nan)
    energy = rows.square().sum(1).mean()
    share = (1 - rows.var(0).sum() / energy).clamp_min(0)
    return torch.where(energy == 0, 1.0, share)


def _layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, part in model.named_modules():
        parts = {child for child, _ in part.named_children()}
        if parts <= {"parametrizations"} and any(p.dim() > 1 for p in part.parameters()):
            yield name, part


def _moments_by_sample(y: torch.Tensor, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute mean and biased variance (N, C) over all dims but the first and ``features``.

    Of a cut tensor those of the whole on every rank. A convolution that runs over slabs does so:
    its wide result is not made for this.
    """
    dims = [dim for dim in range(1, y.dim()) if dim != features]
    if isinstance(y, Sharded) and isinstance(y.pending, SlabEpilogue) and y.pending.links.empty:
        count = math.prod(y.shape[dim] for dim in dims)
        sums = y.pending.block.channel_sums(y.shape[1]).unflatten(1, (-1, y.shape[1]))
        each = (sums[0], sums[1] + sums[2])  # the sum, and that of squares
        mean, square = (
            _whole(sum_over_ranks(y, part, dims, keepdim=False, dtype=part.dtype)) / count
            for part in each
        )
        return mean, (square - mean.square()).clamp_min(0)
    wide = y.float() if y.element_size() < 4 else y
    if not dims:
        mean = _whole(wide)
        return mean, torch.zeros_like(mean)
    var, mean = torch.var_mean(wide, dims, correction=0)
    return _whole(mean), _whole(var)


def _whole(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, Sharded):
        x = x.redistribute(Partition.whole(x.shape), "statistics of a layer").local
    return x.double()


def _summary(mean: torch.Tensor, var: torch.Tensor) -> list[torch.Tensor]:
    centre = mean.mean()
    std = (var + (mean - centre).square()).mean().sqrt()
    return [centre, std, common_share(mean)]


def _norms(layer: nn.Module, scale: float) -> list[float | None]:
    """Compute the norms of a layer's gradient and weights, all parameters together."""
    parameters = list(layer.parameters())
    weight = _norm(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return [None, weight, None]
    gradient = _norm(gradients) / scale
    return [gradient, weight, gradient / weight if weight else None]


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return math.hypot(*(t.detach().float().norm().item() for t in tensors))
