"""A checksum of all bits of a tensor, in their places, about as fast as memory is read."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash

CHUNK = 1 << 22  # numbers of a tensor on a device that are looked at at once
_POSITIVE = (1 << 63) - 1
_LOW = (1 << 32) - 1
_ODD = 1000003  # so that it counts which tensor is which
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By the size of an element [B]; of the largest there are two."""


def memory_order(x: torch.Tensor) -> tuple[int, ...]:
    """The dims in the order in which they lie in memory without a gap, outermost first.

    Where there are gaps (a slice) or repetitions (an expanded tensor), as they are counted.

    >>> memory_order(torch.zeros(2, 3, 4, 5)), memory_order(torch.zeros(2, 3).t())
    ((0, 1, 2, 3), (1, 0))
    """
    counted = tuple(range(x.dim()))
    strides: tuple[int, ...] = x.stride()
    order = tuple(sorted(counted, key=lambda dim: (-strides[dim], dim)))
    return order if not x.is_contiguous() and x.permute(order).is_contiguous() else counted


def digest_in_memory(x: torch.Tensor, order: tuple[int, ...]) -> int:
    """Of a tensor on the CPU, its dims taken in ``order``: XXH3, 63 bits.

    No copy is made where that is its `memory_order`.
    """
    flat = _bits(x.permute(order)).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(flat.data) & _POSITIVE


def digest_on_device(x: torch.Tensor) -> torch.Tensor:
    """The same for a tensor anywhere, whose number (int64) stays where it is.

    A sum of all elements' bits, each times a random number of its place, modulo 2^64.
    """
    bits = _bits(x)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    generator = torch.Generator(device=x.device).manual_seed(0x9E3779B9)
    weights = torch.empty(min(CHUNK, len(bits)), dtype=torch.int64, device=x.device)
    weights.random_(generator=generator)
    for number, part in enumerate(bits.split(CHUNK)):
        values = part.to(torch.int64)
        if part.dtype == torch.int64:  # or the highest bit would count only with odd numbers
            values = values ^ ((values >> 32) & _LOW)
        total += (values * weights[: len(values)]).sum() * (2 * number + 1)  # wraps around
    return total


def digest_of_all(
    tensors: Iterable[torch.Tensor], device: torch.device
) -> tuple[int, torch.Tensor]:
    """Of several tensors in their order: of those on the CPU, and of the others on ``device``."""
    on_host = 0
    on_device = torch.zeros((), dtype=torch.int64, device=device)
    for x in tensors:
        if x.device.type == "cpu":
            own = digest_in_memory(x.detach(), tuple(range(x.dim())))
            on_host = (on_host * _ODD + own) & _POSITIVE
        else:
            on_device = on_device * _ODD + digest_on_device(x)  # wraps around
    return on_host, on_device


def _bits(x: torch.Tensor) -> torch.Tensor:
    """A flat tensor of whole numbers, in the order of the dims."""
    x = x.detach().resolve_conj().resolve_neg()
    return x.contiguous().reshape(-1).view(_WHOLE[x.element_size()])
