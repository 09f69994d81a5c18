"""Inputs without a batch dim: (channels, *space), as convolutions and poolings take them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.ops.common.forms import Operator, spatial_dims
from hyperslab.tensor import Sharded


def with_batch(run: Operator) -> Operator:
    """Decorator of a rule ``(operator, input, ...)``: its input gets a batch dim while it runs.

    Of an operator for n spatial dims an input of n + 1 dims has none.
    """

    @functools.wraps(run)
    def rule(operator: Operator, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, Sharded) or input.dim() != spatial_dims(operator) + 1:
            return run(operator, input, *args, **kwargs)
        check_unbatched(input, operator.__name__)
        result = run(operator, batch_of_one(input), *args, **kwargs)
        return tree_map_only(Sharded, only_sample, result)

    return rule


def check_unbatched(x: Sharded, name: str) -> None:
    """Refuse (channels, *space) whose channels are cut.

    Raises:
        LayoutError: they are: `hyperslab.shard` took them for the batch.
    """
    cut = x.partition.cuts[0]
    if cut is not None:
        raise LayoutError(
            f"{name} takes dim 0 of an input without a batch dim for the channels, but it is cut: "
            f"{x.partition} on {x.grid}\n    use x.unsqueeze(0) before cutting it, or a grid with "
            f"{cut.axis}=1"
        )


def batch_of_one(x: Sharded) -> Sharded:
    """With a dim of 1 in front."""
    partition = Partition((1, *x.partition.shape), (None, *x.partition.cuts))
    return x.like(x.block.unsqueeze(0), partition)


def only_sample(x: Sharded) -> Sharded:
    """Without the dim of 1 in front."""
    return x.like(x.block.squeeze(0), x.partition.without_dim(0))
