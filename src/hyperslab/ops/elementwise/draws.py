"""Random numbers that are written into a tensor, or drawn by its probabilities."""

from __future__ import annotations

import math
from typing import Any

import torch

from hyperslab.errors import LayoutError
from hyperslab.ops.common.forms import register_each
from hyperslab.ops.common.operands import operand_block
from hyperslab.ops.elementwise.creation import rand_like, randn_like
from hyperslab.ops.elementwise.dropout import check_random_state
from hyperslab.ops.elementwise.pointwise import apply_pointwise
from hyperslab.ops.kernels.random_bits import uniform_bits
from hyperslab.tensor import Sharded, register


def drawn_whole(x: Sharded) -> bool:
    """Whether torch's own numbers of the whole tensor are few: one for a sample and channel."""
    return math.prod(x.shape[2:]) == 1


def bernoulli_block(x: Sharded, p: float | torch.Tensor) -> torch.Tensor:
    """This rank's block of ones, each with the probability ``p``, and zeros."""
    check_random_state(x)
    if drawn_whole(x):
        with torch.no_grad():
            chances = p.full() if isinstance(p, Sharded) else p
            whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            return whole.bernoulli_(chances)[x.box.slices()]
    seed = int(torch.randint(2**62, ()).item())
    bits = uniform_bits(x.partition.shape, x.box, seed, x.device)
    if not isinstance(p, torch.Tensor):
        return (bits < math.floor(p * 2**31)).to(x.dtype)
    chances = operand_block(p, target=x.partition, like=x).detach()
    return (bits < chances.double() * 2**31).to(x.dtype)


def _check_generator(generator: torch.Generator | None, name: str) -> None:
    if generator is not None:
        raise LayoutError(
            f"{name} of a cut tensor draws from torch's own generator, which is the same on all "
            "ranks\n    leave generator= out, and call torch.manual_seed"
        )


@register(torch.bernoulli, torch.Tensor.bernoulli, family="elementwise")
def bernoulli(
    input: Sharded, p: float | None = None, *, generator: torch.Generator | None = None
) -> Sharded:
    """The same on every grid; torch's own for a contiguous matrix."""
    _check_generator(generator, "bernoulli")
    ones = bernoulli_block(input, input if p is None else p)
    return input.like(ones, fresh=True)


@register_each("bernoulli_", family="elementwise")
def bernoulli_(
    _: object,
    self: Sharded,
    p: float | torch.Tensor = 0.5,
    *,
    generator: torch.Generator | None = None,
) -> Sharded:
    """In place, the same on every grid; torch's own for a contiguous matrix."""
    _check_generator(generator, "bernoulli_")
    return write_block(self, bernoulli_block(self, p))


@register(torch.Tensor.uniform_, family="elementwise")
def uniform_(self: Sharded, *bounds: float, generator: Any = None, **named: float) -> Sharded:
    """In place, the same on every grid; torch's own for a contiguous matrix."""
    _check_generator(generator, "uniform_")
    low, high = _pair(bounds, named, {"from": 0.0, "to": 1.0})
    if drawn_whole(self):
        return _torchs_own(self, "uniform_", low, high)
    block = rand_like(self).block
    return write_block(self, block * (high - low) + low)


@register(torch.Tensor.normal_, family="elementwise")
def normal_(self: Sharded, *moments: float, generator: Any = None, **named: float) -> Sharded:
    """In place, the same on every grid; torch's own for a contiguous matrix."""
    _check_generator(generator, "normal_")
    mean, std = _pair(moments, named, {"mean": 0.0, "std": 1.0})
    if drawn_whole(self):
        return _torchs_own(self, "normal_", mean, std)
    return write_block(self, randn_like(self).block * std + mean)


@register(torch.Tensor.exponential_, family="elementwise")
def exponential_(
    self: Sharded, lambd: float = 1.0, *, generator: torch.Generator | None = None
) -> Sharded:
    """In place, the same on every grid; torch's own for a contiguous matrix."""
    _check_generator(generator, "exponential_")
    if not lambd > 0:
        raise ValueError(f"exponential_ with the rate {lambd}: it has to be above 0")
    if not self.is_floating_point():
        raise ValueError(f"exponential_ of {self.dtype}: takes floating-point numbers")
    return write_block(self, exponential_block(self, lambd))


def exponential_block(x: Sharded, rate: float = 1.0) -> torch.Tensor:
    """This rank's block of numbers above zero; their logarithm is finite, as torch's."""
    if drawn_whole(x):
        check_random_state(x)
        whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return whole.exponential_(rate)[x.box.slices()]
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    uniform = rand_like(x, dtype=kind).block
    half_a_step = torch.finfo(kind).eps / 4
    return uniform.clamp_min_(half_a_step).log_().div_(-rate).to(x.dtype)


def _pair(given: tuple[float, ...], named: dict[str, float], default: dict[str, float]) -> Any:
    """Two numbers, by place or by name; torch has looked at both before."""
    return (default | dict(zip(default, given, strict=False)) | named).values()


def _torchs_own(x: Sharded, name: str, *options: float) -> Sharded:
    check_random_state(x)
    whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return write_block(x, getattr(whole, name)(*options)[x.box.slices()])


def write_block(x: Sharded, block: torch.Tensor) -> Sharded:
    """In place: this rank's block of the new values."""
    y: Sharded = apply_pointwise(torch.Tensor.copy_, (x, x.like(block)), {})
    return y
