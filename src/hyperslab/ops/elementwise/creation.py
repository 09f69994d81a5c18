"""New tensors in the likeness of a cut one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.ops.elementwise.dropout import check_random_state
from hyperslab.ops.elementwise.pointwise import apply_pointwise
from hyperslab.ops.kernels.random_bits import uniform_bits
from hyperslab.tensor import Sharded, register


def _new(
    x: Sharded, size: Any, make: Callable[..., torch.Tensor], requires_grad: bool = False
) -> torch.Tensor:
    """``make(shape)`` for this rank's block, or for the whole where ``x`` says nothing of cuts."""
    size = tuple(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    partition = x.partition
    if len(size) != partition.ndim or any(size[d] != x.shape[d] for d in partition.cut_dims):
        return make(size).requires_grad_(requires_grad)
    partition = Partition(size, partition.cuts)
    y = x.like(make(partition.box(x.grid.coords).shape), partition)
    return torch.Tensor.requires_grad_(y, requires_grad)


def _register_new(function: Callable[..., torch.Tensor]) -> None:
    def rule(self: Any, *size: Any, requires_grad: bool = False, **options: Any) -> Any:
        """Cut as x where the shape has x's extents in the cut dims; else an ordinary tensor."""
        size = options.pop("size", size)
        return _new(self, size, lambda s: function(self.local, s, **options), requires_grad)

    register(function, family="creation")(rule)


for _function in (torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_empty):
    _register_new(_function)


@register(torch.Tensor.new_full, family="creation")
def new_full(
    self: Any, size: Any, fill_value: Any, *, requires_grad: bool = False, **options: Any
) -> torch.Tensor:
    """Cut as x where the shape has x's extents in the cut dims; else an ordinary tensor."""

    def make(shape: tuple[int, ...]) -> torch.Tensor:
        return self.local.new_full(shape, fill_value, **options)

    return _new(self, size, make, requires_grad)


@register(torch.Tensor.new_tensor, family="creation")
def new_tensor(self: Any, data: Any, **options: Any) -> torch.Tensor:
    """An ordinary tensor, equal on all ranks."""
    if isinstance(data, Sharded) or not isinstance(self, Sharded):
        raise LayoutError("new_tensor of a cut tensor has no rule; use x.clone().detach()")
    return self.local.new_tensor(data, **options)


@register(torch.empty_like, family="creation")
def empty_like(input: Any, **options: Any) -> Sharded:
    """Cut as the other; its values are arbitrary."""
    y: Sharded = apply_pointwise(torch.empty_like, (input,), options)
    return y


def _register_random(function: Callable[..., Any], whole: Callable[..., Any], make: Any) -> None:
    def rule(
        input: Any, *, dtype: Any = None, requires_grad: bool = False, **options: Any
    ) -> torch.Tensor:
        """The same on every grid; without spatial dims equal to torch's own."""
        check_random_state(input)
        kind = dtype or input.dtype
        if input.dim() <= 2:
            device = options.get("device") or input.device
            block = whole(input.shape, dtype=kind, device=device)[input.box.slices()]
        else:
            block = torch.empty_like(input.local, dtype=kind, **options)
            block.copy_(make(input, block))
        return torch.Tensor.requires_grad_(input.like(block), requires_grad)

    register(function, family="random")(rule)


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


_register_random(torch.rand_like, torch.rand, _uniform)
_register_random(torch.randn_like, torch.randn, _normal)
