"""Pixel shuffle and its inverse: channels become pixels, pixels channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hyperslab.errors import LayoutError
from hyperslab.geometry import Cut, Window
from hyperslab.ops.common.placement import check_input, output_partition, place_outputs
from hyperslab.tensor import Sharded, register


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
