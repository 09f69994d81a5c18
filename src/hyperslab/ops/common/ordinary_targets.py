"""Ordinary tensors that an operator in place would give cut values."""

from __future__ import annotations

import torch

from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.tensor import Sharded
from hyperslab.tensor.dispatch import describe


def nobody_else_sees(x: torch.Tensor) -> bool:
    """Whether only the tensor itself, of which the caller has this one, holds its memory.

    No view does, no array of NumPy's from which it was made, and autograd has not saved it.
    """
    storage = x.untyped_storage()
    return (
        not x._is_view()
        and torch._C._storage_Use_Count(storage._cdata) == 2  # the tensor's, and this look
        and storage.resizable()
        and x._use_count() <= 1  # type: ignore[attr-defined]
    )


def made_cut(ordinary: torch.Tensor, partition: Partition, like: Sharded, name: str) -> Sharded:
    """The same tensor, from now on a cut one: a rule is about to write cut values into it.

    Every rank has all of it until now, equal to the others', and keeps its box of it. Who refers to
    the tensor finds it cut.

    Raises:
        LayoutError: somebody else would not notice, for it has views, is a parameter or has a
            gradient.
    """
    plain = type(ordinary) is torch.Tensor and ordinary.layout is torch.strided
    alone = not like.grid.has_values or nobody_else_sees(ordinary)  # in a trace all share nothing
    if not plain or ordinary.requires_grad or not alone:
        raise LayoutError(
            f"{name}: the values are cut, and would make a cut tensor of an ordinary one that is a "
            f"parameter, has a gradient or shares its memory\n{describe([ordinary, like])}"
            "    write into a tensor that was made for it (x.new_zeros(shape), torch.zeros(shape)),"
            " or use x.full()"
        )
    box = partition.box(like.grid.coords)
    block = ordinary[box.slices()].clone(memory_format=torch.contiguous_format)
    return like.like(block, partition, fresh=True).take_place_of(ordinary)
