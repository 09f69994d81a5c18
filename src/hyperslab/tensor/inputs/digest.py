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

    A sum of all elements' bits, each times a number of its place that looks random, modulo 2^64.
    The same on all devices: torch's own random numbers depend on the model of a GPU.
    """
    bits = _bits(x)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    weights = _mixed(torch.arange(1, min(CHUNK, len(bits)) + 1, device=x.device))
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


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """SplitMix64 of them (Steele et al. 2014), without the shifts of the sign."""
    numbers = numbers * -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number
    numbers = (numbers ^ (numbers >> 30)) * -0x40A7B892E31B1A47
    numbers = (numbers ^ (numbers >> 27)) * -0x6B2FB644ECCEEE15
    return numbers ^ (numbers >> 31)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """A flat tensor of whole numbers, in the order of the dims."""
    x = x.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return x.contiguous().reshape(-1).view(_WHOLE[x.element_size()])
