"""Creation of tensors from a cut one: new_zeros, rand_like and their kin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.ops.common.arguments import Integers, integers
from hyperslab.ops.common.forms import Operator, register_each
from hyperslab.ops.elementwise.dropout import check_random_state
from hyperslab.ops.elementwise.pointwise import apply_pointwise
from hyperslab.ops.kernels.random_bits import uniform_bits
from hyperslab.tensor import Sharded, register


def _new(
    x: Sharded,
    shape: tuple[int, ...],
    make: Callable[[tuple[int, ...]], torch.Tensor],
    requires_grad: bool,
) -> torch.Tensor:
    """``make(shape)`` for this rank's block, or for the whole where ``x`` says nothing of cuts."""
    partition = x.partition
    if len(shape) != partition.ndim or any(shape[d] != x.shape[d] for d in partition.cut_dims):
        return make(shape).requires_grad_(requires_grad)
    partition = Partition(shape, partition.cuts)
    y = x.like(make(partition.box(x.grid.coords).shape), partition)
    return torch.Tensor.requires_grad_(y, requires_grad)


@register_each("new_zeros", "new_ones", "new_empty", family="elementwise")
def new_constant(
    operator: Operator,
    self: Sharded,
    *sizes: Integers,
    size: Integers | None = None,
    requires_grad: bool = False,
    **options: object,
) -> torch.Tensor:
    """Cut as x where the shape has x's extents in the cut dims; else an ordinary tensor."""
    shape = integers(*sizes) if size is None else integers(size)
    return _new(self, shape, lambda own: operator(self.local, own, **options), requires_grad)


@register(torch.Tensor.new_full, family="elementwise")
def new_full(
    self: Sharded,
    size: Sequence[int],
    fill_value: float,
    *,
    requires_grad: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Cut as x where the shape has x's extents in the cut dims; else an ordinary tensor."""

    def make(shape: tuple[int, ...]) -> torch.Tensor:
        return self.local.new_full(shape, fill_value, **options)

    return _new(self, tuple(size), make, requires_grad)


@register(torch.Tensor.new_tensor, family="elementwise")
def new_tensor(self: torch.Tensor, data: object, **options: Any) -> torch.Tensor:
    """An ordinary tensor, equal on all ranks."""
    if isinstance(data, Sharded) or not isinstance(self, Sharded):
        raise LayoutError("new_tensor of a cut tensor has no rule; use x.clone().detach()")
    return self.local.new_tensor(data, **options)


@register(torch.empty_like, family="elementwise")
def empty_like(input: Sharded, **options: object) -> Sharded:
    """Cut as the other; its values are arbitrary."""
    return apply_pointwise(torch.empty_like, (input,), options)


@register(torch.rand_like, family="elementwise")
def rand_like(input: Sharded, **options: Any) -> Sharded:
    """The same on every grid; without spatial dims equal to torch's own."""
    return _random(input, torch.rand, _uniform, **options)


@register(torch.randn_like, family="elementwise")
def randn_like(input: Sharded, **options: Any) -> Sharded:
    """The same on every grid; without spatial dims equal to torch's own."""
    return _random(input, torch.randn, _normal, **options)


def _random(
    x: Sharded,
    draw: Callable[..., torch.Tensor],
    values: Callable[[Sharded, torch.Tensor], torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    **options: Any,
) -> Sharded:
    """Torch's own ``draw`` of the whole, or ``values`` by global indices for a volume."""
    check_random_state(x)
    kind = dtype or x.dtype
    if x.dim() <= 2:
        device = options.get("device") or x.device
        block = draw(x.shape, dtype=kind, device=device)[x.box.slices()]
    else:
        block = torch.empty_like(x.local, dtype=kind, **options)
        block.copy_(values(x, block))
    y = x.like(block)
    torch.Tensor.requires_grad_(y, requires_grad)
    return y


def _uniform(x: Sharded, like: torch.Tensor) -> torch.Tensor:
    """Multiples of the type's resolution in [0, 1), as torch draws them."""
    digits = min(31, 1 - round(math.log2(torch.finfo(like.dtype).eps)))
    return _bits(x, like).bitwise_right_shift(31 - digits).to(like.dtype) / 2**digits


def _normal(x: Sharded, like: torch.Tensor) -> torch.Tensor:
    """Box and Muller 1958, of two uniform numbers in (0, 1]."""
    kind = torch.float64 if like.dtype == torch.float64 else torch.float32
    radius, angle = ((_bits(x, like).to(kind) + 1) / 2**31 for _ in range(2))
    return radius.log_().mul_(-2).sqrt_() * angle.mul_(2 * math.pi).cos_()


def _bits(x: Sharded, like: torch.Tensor) -> torch.Tensor:
    seed = int(torch.randint(2**62, ()).item())
    return uniform_bits(x.partition.shape, x.box, seed, like.device)
