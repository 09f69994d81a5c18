"""Averages a network's weights over steps: ``ema`` in a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from hyperslab.errors import CheckpointError


class MovingAverage:
    """Holds the exponential moving average of a network's weights and buffers that are no integers.

    After step t of the optimizer the average is d times itself and 1 - d times the weights, where
    d is ``decay``, or (1 + t) / (10 + t) while that is smaller: else the first, random weights
    would stay in it for long. Running statistics of batch norm are averaged alike. Every rank has
    equal weights and computes equal averages. Those of half precision are kept in float32, in which
    a step of 1 - d is not rounded away.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = _averaged(model)
        self.values = {
            name: weight.to(_KEPT_AS.get(weight.dtype, weight.dtype), copy=True)
            for name, weight in self._weights.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights after a step, counted from 1."""
        part = 1 - min(self.decay, (1 + step) / (10 + step))
        for name, value in self.values.items():
            value.lerp_(self._weights[name].to(value.dtype), part)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the network have the averages inside, and its own weights again afterwards."""
        own = {name: weight.clone() for name, weight in self._weights.items()}
        _copy(self.values, self._weights)
        try:
            yield
        finally:
            _copy(own, self._weights)

    def restore(self, state: Mapping[str, torch.Tensor] | None, path: Path) -> None:
        """Go on from the averages of the checkpoint ``path``; from its weights without any."""
        if state is None:
            _copy(self._weights, self.values)
            return
        check_same_names(self.values, state, path)
        _copy(state, self.values)


def use_averages(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor] | None, path: Path
) -> None:
    """Give a network the averages of a checkpoint, if it has some, in place of the last weights."""
    if state is not None:
        weights = _averaged(model)
        check_same_names(weights, state, path)
        _copy(state, weights)


def check_same_names(
    weights: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], path: Path
) -> None:
    """Refuse averages that are of another network (`CheckpointError`)."""
    tensors = isinstance(state, Mapping) and all(map(torch.is_tensor, state.values()))
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    if not tensors or {name: tuple(value.shape) for name, value in state.items()} != shapes:
        raise CheckpointError(f"the averages (ema) of the checkpoint {path} are of another network")


_KEPT_AS = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def _averaged(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return real and complex parameters and buffers; a state dict shares their memory."""
    found = model.state_dict()
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    }


@torch.no_grad()
def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    for name, value in target.items():
        value.copy_(source[name])
