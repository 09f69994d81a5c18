"""Complex numbers: their parts, as views."""

from __future__ import annotations

from types import GetSetDescriptorType

import torch

from hyperslab.geometry import Partition
from hyperslab.ops.common.forms import Operator, register_each
from hyperslab.ops.common.operands import check_uncut
from hyperslab.tensor import Sharded, register


@register(torch.view_as_real, family="fourier")
def view_as_real(input: Sharded) -> Sharded:
    """Real and imaginary part as a new last dim; a view."""
    block = torch.view_as_real(input.local)
    return input.like(block, Partition((*input.shape, 2), (*input.partition.cuts, None)))


@register(torch.view_as_complex, family="fourier")
def view_as_complex(input: Sharded) -> Sharded:
    """Of a last dim of 2, which is not cut; a view."""
    check_uncut(input, (input.dim() - 1,), "view_as_complex needs all of")
    block = torch.view_as_complex(input.local)
    return input.like(block, Partition(input.partition.shape[:-1], input.partition.cuts[:-1]))


def _forms(name: str) -> tuple[Operator, Operator]:
    """As a function, and as a method or an attribute."""
    method = getattr(torch.Tensor, name)
    attribute = isinstance(method, GetSetDescriptorType)
    return getattr(torch, name), method.__get__ if attribute else method


@register_each(*map(_forms, ("real", "imag", "conj", "resolve_conj")), family="fourier")
def complex_view(operator: Operator, input: Sharded, *_: object) -> Sharded:
    """Of the block; a view."""
    return input.like(operator(input.local))
