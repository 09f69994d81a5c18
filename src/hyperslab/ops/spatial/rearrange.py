"""Distributes flips, rolls, right-angled turns and pixel shuffles: values change places."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hyperslab.comm import plan_exchange
from hyperslab.comm.exchange import fetch
from hyperslab.errors import LayoutError
from hyperslab.geometry import Cover, Cut, Window
from hyperslab.ops.overloads import Integers, integers
from hyperslab.ops.placement import check_input, output_partition, place_outputs
from hyperslab.ops.views.concat import SourceInterval, join
from hyperslab.ops.views.reshape import exchanged, reshape_to
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import read_dims


def flipped(x: Sharded, dims: Sequence[int]) -> Sharded:
    """Mirrors along some dims; the result is cut as the input.

    Distribution scheme: 1. every rank fetches the mirror image of its box, 2. it flips that.
    """
    cover = x.partition.cover
    intervals = list(cover.intervals)
    for dim in dims:
        extent = x.shape[dim]
        intervals[dim] = tuple((extent - hi, extent - lo) for lo, hi in intervals[dim])
    plan = plan_exchange(x.partition, Cover(cover.axes, tuple(intervals)), x.grid)
    return x.like(torch.flip(fetch(x.local, plan, what="a flip"), list(dims)))


def rolled(x: Sharded, shift: int, dim: int) -> Sharded:
    """Rolls along one dim; the result is cut as the input.

    Distribution scheme: 1. not cut: the local roll; 2. cut: every rank fetches what comes to lie
    in its box from the end and from the beginning, and joins the two.
    """
    extent = x.shape[dim]
    turn = extent - shift % extent if extent else 0
    if x.partition.cuts[dim] is None:
        return x.like(x.local.roll(shift, dim))
    ends = [SourceInterval(x, (turn, extent)), SourceInterval(x, (0, turn))]
    return join(ends, dim, x.partition, x, "a roll")


@register(torch.flip, torch.Tensor.flip, family="spatial")
def flip(input: Sharded, *dims: Integers, **named: Integers) -> Sharded:
    """Any dims; along cut dims every rank fetches the mirror image of its box."""
    return flipped(input, _distinct_dims(input, integers(*dims, *named.values()), "flip"))


def _distinct_dims(x: Sharded, dims: Sequence[int], name: str) -> tuple[int, ...]:
    found = read_dims(dims, x.dim(), name)
    if len(set(found)) != len(found):
        raise ValueError(f"{name}: a dim appears twice in {tuple(dims)}")
    return found


@register(torch.fliplr, torch.Tensor.fliplr, family="spatial")
def fliplr(input: Sharded) -> Sharded:
    """Along dim 1, as flip."""
    return flipped(input, read_dims([1], input.dim(), "fliplr"))


@register(torch.flipud, torch.Tensor.flipud, family="spatial")
def flipud(input: Sharded) -> Sharded:
    """Along dim 0, as flip."""
    return flipped(input, read_dims([0], input.dim(), "flipud"))


@register(torch.roll, torch.Tensor.roll, family="spatial", dims=["dims"])
def roll(input: Sharded, shifts: Integers, dims: Integers | None = None) -> Sharded:
    """Any dims; along a cut dim every rank fetches the two parts that come to lie in its box."""
    turns = integers(shifts)
    along = () if dims is None else integers(dims)
    if not along:
        row = reshape_to(input, (input.numel(),))
        return reshape_to(rolled(row, turns[0], 0), input.shape)
    if len(turns) != len(along):
        raise ValueError(f"roll: {len(turns)} shifts for {len(along)} dims")
    for shift, dim in zip(turns, along, strict=True):
        input = rolled(input, shift, dim)
    return input


@register(torch.rot90, torch.Tensor.rot90, family="spatial", dims=["dims"])
def rot90(input: Sharded, k: int = 1, dims: Sequence[int] = (0, 1)) -> Sharded:
    """In the plane of any two dims; each cut goes with its dim, across the cut as flip."""
    a, b = _distinct_dims(input, dims, "rot90")
    if k % 4 == 0:
        return input.like(input.local.clone())
    if k % 4 == 2:
        return flipped(input, [a, b])
    return exchanged(flipped(input, [b if k % 4 == 1 else a]), a, b)


@register(torch.pixel_shuffle, family="spatial")
def pixel_shuffle(input: Sharded, upscale_factor: int) -> Sharded:
    """Block by block: every pixel becomes a square of them."""
    check_input(input, 2, "pixel_shuffle")
    r = upscale_factor
    local = F.pixel_shuffle(input.local, r)
    cuts = [c and Cut(c.axis, tuple(r * b for b in c.bounds)) for c in input.partition.cuts[2:]]
    extents = [r * extent for extent in input.shape[2:]]
    return input.like(local, output_partition(input.partition, local.shape[1], extents, cuts))


@register(torch.pixel_unshuffle, family="spatial")
def pixel_unshuffle(input: Sharded, downscale_factor: int) -> Sharded:
    """Any cut: it is moved so that it goes through no square of pixels."""
    check_input(input, 2, "pixel_unshuffle")
    r = downscale_factor
    if any(extent % r for extent in input.shape[2:]):
        raise LayoutError(
            f"pixel_unshuffle of {input.partition} on {input.grid}: height and width should be "
            f"divisible by {r}\n    use torch.nn.functional.pad before it"
        )
    channels = input.shape[1] * r * r
    extents = [extent // r for extent in input.shape[2:]]
    x, cuts = place_outputs(input, [Window(r, r)] * 2, extents, "pixel_unshuffle")
    moved = [c and Cut(c.axis, tuple(r * b for b in c.bounds)) for c in cuts]
    whole = output_partition(x.partition, x.shape[1], x.shape[2:], moved)
    x = x.redistribute(whole, "squares of pixel_unshuffle")
    partition = output_partition(x.partition, channels, extents, cuts)
    return x.like(F.pixel_unshuffle(x.local, r), partition)
