"""Ordinary tensors that enter a parallelised module in training."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hyperslab.comm import Grid
from hyperslab.comm.rows import Rows
from hyperslab.errors import LayoutError
from hyperslab.tensor import Sharded
from hyperslab.tensor.inputs.comparisons import comparisons_of
from hyperslab.tensor.inputs.digest import digest_of_all
from hyperslab.tensor.inputs.handed_in import ranks_in_words

Ordinary = Literal["check", "trust"]
ORDINARY: tuple[str, ...] = get_args(Ordinary)


class OrdinaryInputs:
    """Of the module named ``name``: what it is given has to be one thing on all ranks."""

    def __init__(self, name: str, grid: Grid) -> None:
        self.name = name
        self.grid = grid

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayoutError | None:
        """What is wrong with a training on these arguments: there is no cut tensor among them.

        All ranks call this. Where they all pass nothing but cut tensors there is no message.

        Raises:
            LayoutError: ordinary tensors beside cut ones are not equal on all ranks. (On a CUDA
                device of later forwards than the first: from the next one.)
        """
        if not kwargs and all(type(value) is Sharded for value in args):
            return None
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        ordinary = [x for x in given if not isinstance(x, Sharded | nn.Parameter)]
        if len(ordinary) == len(given):
            numbers = [x for x in ordinary if x.is_floating_point() or x.is_complex()]
            return self._alone(numbers[0]) if numbers else None
        if ordinary:
            self._compare(ordinary)
        return None

    def _alone(self, x: torch.Tensor) -> LayoutError:
        return LayoutError(
            f"an ordinary tensor {tuple(x.shape)} {x.dtype} enters the parallelised {self.name} in "
            f"training on {self.grid.size} ranks, and no cut one: each rank would train alone on "
            "what it holds\n    cut it: hyperslab.shard(x, grid), or hyperslab.scatter(x, grid) "
            "where one rank holds it\n    if each rank is to compute its own, say "
            'hyperslab.parallelize(module, grid, ordinary_inputs="trust")'
        )

    def _compare(self, ordinary: Sequence[torch.Tensor]) -> None:
        name = self.name
        forms = "; ".join(f"{tuple(x.shape)} {x.dtype}" for x in ordinary)

        def judge(found: Sequence[Sequence[int]]) -> None:
            strangers = [rank for rank, row in enumerate(found) if row != found[0]]
            if strangers:
                raise LayoutError(
                    f"{ranks_in_words(strangers)} would pass other ordinary tensors to {name} than "
                    f"rank 0, beside cut ones\n    on this rank they are {forms}\n    an ordinary "
                    "tensor counts as one of which every rank has an equal copy: draw random "
                    "numbers\n    from torch's generator, cut it by hyperslab.shard, or say "
                    'hyperslab.parallelize(module, grid, ordinary_inputs="trust")'
                )

        on_host, on_device = digest_of_all(ordinary, self.grid.device)
        numbers = [zlib.crc32(forms.encode()), on_host]
        rows = Rows(self.grid, numbers, on_device, "the comparison of ordinary inputs")
        comparisons_of(self.grid).add(rows, (name, forms), judge)
