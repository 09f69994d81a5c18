"""Dropout, whose masks do not depend on the grid."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from hyperslab.comm import Grid, per_grid
from hyperslab.errors import CommError, LayoutError
from hyperslab.ops.common.forms import Operator, register_each
from hyperslab.ops.common.operands import check_writable
from hyperslab.ops.common.unbatched import check_unbatched
from hyperslab.ops.kernels.random_bits import uniform_bits
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe, gather_first

CHECK_EVERY = 64
"""Calls between two checks that all ranks are in the same random state."""


def dropout_shape(x: Sharded, shape: tuple[int, ...], p: float, inplace: bool) -> Sharded:
    """Multiply by one global mask of ``shape``, drawn in full on every rank as torch draws it."""
    check_random_state(x)
    scale = F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p, True)
    return _multiply(x, own_part(scale, x), 1.0, inplace)


def own_part(mask: torch.Tensor, x: Sharded) -> torch.Tensor:
    """What this rank's block needs of a global mask, whose extents are those of ``x`` or 1."""
    for dim, extent in enumerate(mask.shape):
        if extent != 1:
            lo, hi = x.box.interval(dim)
            mask = mask.narrow(dim, lo, hi - lo)
    return mask


def dropout_volume(x: Sharded, p: float, inplace: bool) -> Sharded:
    """Every element's mask is a hash of one drawn seed and its global index.

    A mask drawn in full would take the memory of the whole activation on every rank.
    """
    check_random_state(x)
    seed = int(torch.randint(2**62, ()).item())
    keep = uniform_bits(x.partition.shape, x.box, seed, x.device) >= math.floor(p * 2**31)
    return _multiply(x, keep, 1 / (1 - p) if p < 1 else 0.0, inplace)


def _multiply(x: Sharded, mask: torch.Tensor, scale: float, inplace: bool) -> Sharded:
    if inplace:
        check_writable(x, "dropout")
        torch.Tensor.mul_(torch.Tensor.mul_(x, mask), scale)
        x.note_change()
        return x
    return x.like(x.block * mask * scale if scale != 1.0 else x.block * mask, fresh=True)


@per_grid
def _calls(_grid: Grid) -> Iterator[int]:
    """How often a random operator ran before."""
    return itertools.count()


def check_random_state(x: Sharded) -> None:
    """Ranks whose generators differ would drop different elements of one sample.

    Raises:
        CommError: the ranks' random states differ.
    """
    grid = x.grid
    if grid.size == 1 or next(_calls(grid)) % CHECK_EVERY != 0:
        return
    state = torch.get_rng_state() if x.device.type == "cpu" else torch.cuda.get_rng_state(x.device)
    if not grid.same_on_all(zlib.crc32(state.numpy().tobytes())):
        raise CommError(
            "the ranks' random states differ, so they would not drop the same elements\n"
            "    call torch.manual_seed(seed) with the same seed on every rank, and draw random "
            "numbers on all ranks alike"
        )


def check_whole_mask(tensors: Sequence[torch.Tensor | None], p: float, name: str) -> None:
    """Masks that torch draws within ``name`` are the serial ones where every rank has the whole.

    Raises:
        LayoutError: one of the tensors is cut.
        CommError: the ranks' random states differ.
    """
    cut = [t for t in tensors if isinstance(t, Sharded)]
    if p <= 0:
        return
    axes = dict.fromkeys(axis for t in cut for axis in t.partition.axes)
    if axes:
        raise LayoutError(
            f"{name} draws its dropout mask for the block only\n{describe(cut)}"
            f"    use a dropout of 0 in it; or, of all of these,\n{gather_first(*axes)}"
        )
    check_random_state(cut[0])


@register(F.dropout, torch.dropout, family="elementwise", merged=True)
def dropout(
    input: Sharded,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool | None = None,
) -> Sharded:
    """One global mask, the same on every grid; torch's own for a contiguous matrix."""
    if not drops(p, training if train is None else train):
        return input
    if input.dim() > 2:
        return dropout_volume(input, p, inplace)
    return dropout_shape(input, tuple(input.shape), p, inplace)


@register(torch.dropout_, family="elementwise")
def dropout_(input: Sharded, p: float, train: bool) -> Sharded:
    """The same in place."""
    return dropout(input, p, train, inplace=True)


BATCHED_DIMS = {
    "dropout1d": (3,),
    "dropout2d": (4,),
    "dropout3d": (5,),
    "feature_dropout": (2, 3, 4, 5),
}


@register_each(*BATCHED_DIMS, family="elementwise")
def feature_dropout(
    operator: Operator,
    input: Sharded,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Sharded:
    """Whole channels: torch's own mask, the same on every grid."""
    name = operator.__name__
    active = drops(p, training)
    alone = name in ("dropout1d", "dropout3d") and input.dim() == BATCHED_DIMS[name][0] - 1
    if alone:
        check_unbatched(input, name)
    elif input.dim() not in BATCHED_DIMS[name]:
        raise LayoutError(f"{name} needs a batched input, got {input.partition}")
    if not active:
        return input
    front = 1 if alone else 2
    shape = (*input.shape[:front], *[1] * (input.dim() - front))
    return dropout_shape(input, shape, p, inplace)


def drops(p: float, training: bool) -> bool:
    """Whether anything is dropped.

    Raises:
        ValueError: ``p`` is no probability.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return training and p > 0.0
