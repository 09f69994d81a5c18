"""Brings operands of different cuts to one partition, and checks the ones that change in place.

In reading order: a small tensor on the device of a block; blocks of operands under a common
partition; ordinary tensors that an operator in place would give cut values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from hyperslab.comm import Grid, per_grid
from hyperslab.errors import LayoutError
from hyperslab.geometry import Cut, Interval, Partition
from hyperslab.tensor import Sharded, gather
from hyperslab.tensor.dispatch import describe, gather_first
from hyperslab.util.capture import is_capturing
from hyperslab.util.torch_internals import count_storage_users, count_tensor_users, is_view

LAYOUTS = 4096
"""Limits the layouts that are cached, of one kind of call each."""


def device_constant(
    values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Makes a small tensor whose copy to a GPU waits for nothing that is queued there.

    `torch.tensor` with a device waits until all is done that the device was given before, and so
    does CUDA where the copy is not from page-locked memory. In a CUDA graph kernels write it: each
    replay would copy from memory that is somebody else's by then.
    """
    if is_capturing():
        kind = torch.tensor(values, dtype=dtype, device="cpu").dtype
        numbers = [torch.full((1,), value, dtype=kind, device=device) for value in values]
        return torch.cat([torch.empty(0, dtype=kind, device=device), *numbers])
    host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


Label = TypeVar("Label", bound=Hashable)


def first_cuts(dims: Iterable[tuple[Label, Cut | None]]) -> dict[Label, Cut]:
    """Finds the cut of each labelled dim of several operands, in the order of the operands.

    As in the first operand that is cut there; an axis of the grid cuts one dim only.

    >>> halves, thirds = Cut("depth", (0, 3, 6)), Cut("height", (0, 2, 4, 6))
    >>> first_cuts([("row", halves), ("column", halves), ("row", thirds)]) == {"row": halves}
    True
    """
    cuts: dict[Label, Cut] = {}
    taken: list[str] = []
    for label, cut in dims:
        if cut is not None and cut.axis not in taken and label not in cuts:
            cuts[label] = cut
            taken.append(cut.axis)
    return cuts


def block_of(tensor: torch.Tensor, partition: Partition, grid: Grid, what: str) -> torch.Tensor:
    """Returns this rank's block of an operand, cut as ``partition``.

    A `Sharded` that is cut otherwise is redistributed, and ``what`` names the message; an ordinary
    tensor is equal on all ranks, and this one takes its part.
    """
    if isinstance(tensor, Sharded):
        # The block, not the cut tensor: autograd would save that one with its global shape.
        return tensor.redistribute(partition, what).block
    return tensor[own_slices(grid, partition)]


@per_grid
def own_slices(grid: Grid, partition: Partition) -> tuple[slice, ...]:
    return partition.box(grid.coords).slices()


Operand = TypeVar("Operand", torch.Tensor, torch.Tensor | None)


def whole_of(tensor: Operand, what: str) -> Operand:
    """Gathers an operand that every rank needs whole: filters may come from cut features."""
    if not isinstance(tensor, Sharded):
        return tensor
    return tensor.redistribute(Partition.whole(tensor.shape), what).block


def without_empty_shards(x: Sharded, dims: Iterable[int]) -> Sharded:
    """Gathers ``x`` where some rank has nothing of ``dims``, no mean, maximum or last element."""
    if not x.partition.thin:
        return x
    cuts = [x.partition.cuts[d] for d in dims]
    thin = [cut.axis for cut in cuts if cut is not None and cut.thin]
    return gather(x, thin) if thin else x


Held = Partition | torch.Size
"""Types how an operand is cut, or the shape of an ordinary one."""


def common_partition(operands: Sequence[torch.Tensor], function: Callable[..., Any]) -> Partition:
    """Broadcast the global shapes; each dim is cut as its first operand that is cut there."""
    held = tuple([t.partition if isinstance(t, Sharded) else t.shape for t in operands])
    return _lay_out_broadcast(held, getattr(function, "__name__", "an operator"))


@functools.lru_cache(LAYOUTS)
def _lay_out_broadcast(held: tuple[Held, ...], name: str) -> Partition:
    cut = [each for each in held if isinstance(each, Partition)]
    if all(each == cut[0] or each == () for each in held):
        return cut[0]
    shapes = [tuple(each.shape if isinstance(each, Partition) else each) for each in held]
    try:
        shape = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        raise LayoutError(f"{name}: global shapes {shapes} do not broadcast") from error
    cuts = first_cuts(
        dim for each in cut for dim in enumerate(each.cuts, start=len(shape) - each.ndim)
    )
    partition = Partition(shape, tuple(cuts.get(dim) for dim in range(len(shape))))
    return next((each for each in cut if each == partition), partition)


def operand_block(value: Any, *, target: Partition, like: Sharded) -> Any:
    """Returns this rank's part of an operand that is broadcast to ``target``; keeps numbers."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Sharded):
        own = _cut_as(value.partition, target)
        return value.block if own is None else value.redistribute(own, "aligning operands").block
    own = _cut_as(value.shape, target)
    return value if own is None else block_of(value, own, like.grid, "aligning operands")


@functools.lru_cache(LAYOUTS)
def _cut_as(held: Held, target: Partition) -> Partition | None:
    """Returns how an operand is cut that is broadcast to ``target``; None: it is as it is."""
    before = held if isinstance(held, Partition) else Partition.whole(held)
    shift = target.ndim - before.ndim
    cuts = tuple(
        target.cuts[dim + shift] if extent == target.shape[dim + shift] else None
        for dim, extent in enumerate(before.shape)
    )
    partition = Partition(before.shape, cuts)
    return None if partition == before else partition


def aligned_but(
    tensors: Sequence[torch.Tensor], dim: int, name: str, *, fixed: bool = False
) -> tuple[list[torch.Tensor], tuple[Cut | None, ...], Sharded]:
    """Aligns tensors in all dims but ``dim``; returns blocks, common cuts and a cut operand.

    Each dim is cut as in the first tensor that is cut there; ``fixed``: as in the first alone.
    """
    cut = [t for t in tensors if isinstance(t, Sharded)]
    like = cut[0]
    for tensor in cut:
        if tensor.partition.cuts[dim] is not None:
            check_uncut(tensor, (dim,), f"{name} along")
    if len(cut) == len(tensors) and all(t.partition == like.partition for t in cut):
        return [t.block for t in cut], like.partition.cuts, like  # nearly always
    check_alike_but(tensors, dim, name)
    known = first_cuts(
        dim
        for t in (tensors[:1] if fixed else tensors)
        if isinstance(t, Sharded)
        for dim in enumerate(t.partition.cuts)
    )
    cuts = tuple(known.get(d) for d in range(like.dim()))
    what = f"aligning operands of {name}"
    blocks = [block_of(t, Partition(tuple(t.shape), cuts), like.grid, what) for t in tensors]
    return blocks, cuts, like


def check_alike_but(tensors: Sequence[torch.Tensor], dim: int, name: str) -> None:
    """Refuses on every rank what one rank's blocks would not show: other dims that differ."""
    if len({(t.dim(), other_extents(t.shape, dim)) for t in tensors}) > 1:
        raise differ_beside(tensors, dim, name, "crop or expand")


def differ_beside(tensors: Sequence[torch.Tensor], dim: int, name: str, remedy: str) -> LayoutError:
    return LayoutError(
        f"{name} along dim {dim}: the other dims of the global shapes differ\n"
        f"{describe(tensors)}    {remedy} them to one shape"
    )


def other_extents(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def check_cut(name: str, first: object, *others: object) -> Sharded:
    """Return the operand that has to be cut, and refuse cut ones beside it."""
    if isinstance(first, Sharded) and Sharded not in map(type, others):
        return first
    raise LayoutError(
        f"{name}: the first operand has to be cut, and those beside it are ordinary\n"
        f"{describe([first, *others])}    use .full() of what is cut beside it"
    )


def check_uncut(x: Sharded, dims: Sequence[int], what: str) -> None:
    """Refuse a tensor that is cut along one of ``dims``.

    Args:
        what: the beginning of the message, such as "scatter along" or "sort needs all of".
    """
    axes = [cut.axis for d in dims if (cut := x.partition.cuts[d]) is not None]
    if axes:
        raise LayoutError(
            f"{what} dim {', '.join(map(str, dims))}, which is cut: {x.partition} on {x.grid}\n"
            f"{gather_first(*axes)}"
        )


def check_writable(x: Sharded, name: str) -> None:
    """Refuse to change a copy where serial torch would change the tensor it is a view of."""
    if x.is_copy:
        raise LayoutError(
            f"{name} in place, on a copy where serial torch has a view: its base would not change "
            f"as it does serially\n{describe([x])}    use the operator that returns a new tensor "
            "(inplace=False), and write what it returns into the base: x[:, 2] = x[:, 2] * 3"
        )


def is_only_reference(x: torch.Tensor) -> bool:
    """Returns whether nothing but this reference of the caller holds the tensor's memory.

    No view does, no array of NumPy's from which it was made, and autograd has not saved it.
    """
    storage = x.untyped_storage()
    return (
        not is_view(x)
        and count_storage_users(storage) == 2  # the tensor's, and this look
        and storage.resizable()
        and count_tensor_users(x) <= 1
    )


def check_only_reference(ordinary: torch.Tensor, like: Sharded, name: str) -> None:
    """Refuse to make a cut tensor of an ordinary one of which somebody else would not notice."""
    plain = type(ordinary) is torch.Tensor and ordinary.layout is torch.strided
    alone = not like.grid.has_values or is_only_reference(ordinary)  # in a trace all share nothing
    if not plain or ordinary.requires_grad or not alone:
        raise LayoutError(
            f"{name}: the values are cut, and would make a cut tensor of an ordinary one that is a "
            f"parameter, has a gradient or shares its memory\n{describe([ordinary, like])}"
            "    write into a tensor that was made for it (x.new_zeros(shape), torch.zeros(shape)),"
            " or use x.full()"
        )


def check_only_reference_of_part(
    part: torch.Tensor, base: torch.Tensor, like: Sharded, name: str
) -> list[Interval]:
    """Refuse to make a cut tensor of an ordinary one of which more than this view was taken.

    Returns the interval that the view has of each dim.
    """
    same = part.dtype == base.dtype and part.is_conj() == base.is_conj()
    box = same and part.dim() == base.dim() and base.is_contiguous()
    rest = part.storage_offset() - base.storage_offset()
    spans: list[Interval] = []
    dims = zip(part.shape, base.shape, part.stride(), base.stride(), strict=box)
    for extent, own, step, by in dims:
        low = rest // by if own > 1 and by else 0
        spans.append((low, low + extent))
        rest -= low * by
        box = box and (extent == 1 or step == by) and low + extent <= own
    plain = type(part) is type(base) is torch.Tensor and not (
        part.requires_grad or base.requires_grad
    )
    storage = base.untyped_storage()
    alone = not like.grid.has_values or (
        count_storage_users(storage) == 3  # the two tensors', and this look
        and storage.resizable()
        and count_tensor_users(part) <= 1
        and count_tensor_users(base) <= 2
    )
    if not (box and rest == 0 and plain and alone and part.numel()):
        raise LayoutError(
            f"{name}: the values are cut, and would make a cut tensor of an ordinary one of which "
            f"this is a part\n{describe([part, base, like])}"
            "    write into a tensor that is cut (torch.zeros_like(x), x.new_zeros(x.shape)), or "
            "use x.full()"
        )
    return spans


def turn_into_cut(ordinary: torch.Tensor, partition: Partition, like: Sharded) -> Sharded:
    """Turns a tensor into a cut one, in place: a rule is about to write cut values into it.

    Every rank has all of it until now, equal to the others', and keeps its box of it. Who refers to
    the tensor finds it cut.
    """
    box = partition.box(like.grid.coords)
    block = ordinary[box.slices()].clone(memory_format=torch.contiguous_format)
    return like.like(block, partition, fresh=True).take_place_of(ordinary)
