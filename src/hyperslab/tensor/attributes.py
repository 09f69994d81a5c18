"""Registers the rules of a cut tensor's attributes and of its values in Python, NumPy and files.

The attributes are those that are the same for the block and the whole. A tensor that is not cut
gives its values as any tensor does; one that is cut refuses to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyperslab.errors import UnsupportedOp
from hyperslab.tensor.dispatch import op_name, refuse, register
from hyperslab.tensor.sharded import Sharded

TENSOR_PROPERTIES = """
dtype device layout requires_grad grad_fn is_leaf is_cpu is_cuda is_meta is_mkldnn is_mps is_nested
is_quantized is_sparse is_sparse_csr is_xpu itemsize names output_nr retains_grad _version
_backward_hooks
""".split()

KNOWN_BEFORE = "dtype device is_cpu is_cuda get_device is_complex is_floating_point".split()
"""Lists those that are asked of a block that is pending without having it computed.

Layers of Fourier networks ask a spectrum for them, to make zeros for the frequencies they keep.
"""

TENSOR_METHODS = """
element_size get_device is_complex is_conj is_floating_point is_inference is_neg is_signed
requires_grad_ register_post_accumulate_grad_hook
""".split()


def _register_attributes() -> None:
    def add(name: str, function: Any, doc: str) -> None:
        if callable(function):  # not every release of torch has all of them
            lazy = name in KNOWN_BEFORE
            register(function, family="attribute", doc=doc, lazy=lazy, merged=True)(function)

    for name in TENSOR_PROPERTIES:
        descriptor = getattr(torch.Tensor, name, None)
        for accessor in ("__get__", "__set__"):
            add(
                name,
                getattr(descriptor, accessor, None),
                "Is the same for the block and the whole.",
            )
    for name in TENSOR_METHODS:
        for space in (torch.Tensor, torch):
            add(name, getattr(space, name, None), "Asks or marks the block.")


_register_attributes()


@register(torch.Tensor.retain_grad, family="attribute", merged=True)
def retain_grad(self: Sharded) -> None:
    """Asks or marks the block."""
    self.check_on_path("retain_grad")
    torch.Tensor.retain_grad(self)


@register(torch.Tensor.is_contiguous, family="attribute", merged=True)
def is_contiguous(
    self: Sharded, memory_format: torch.memory_format = torch.contiguous_format
) -> bool:
    """Asks about a memory format: all ranks alike, of a part of a cut dim no for an answer."""
    if memory_format is torch.contiguous_format:
        return bool(lies_as_whole(self, memory_format))
    return self.local.is_contiguous(memory_format=memory_format)


def lies_as_whole(x: Sharded, memory_format: torch.memory_format) -> bool | None:
    """Tell whether serial torch has a tensor in this format; None where no block says so."""
    if 0 in x.shape:
        return True  # for torch, whatever its strides are
    block = x.local
    if x.is_crop:
        return None
    if not x.partition.axes:
        return block.is_contiguous(memory_format=memory_format)
    plain = torch.empty(block.shape, device="meta", memory_format=memory_format)
    strides = zip(x.shape, block.stride(), plain.stride(), strict=True)
    alike = all(a == b for extent, a, b in strides if extent > 1)
    # Torch takes any stride of an extent of 1, which a dim may have on some ranks only, and forgets
    # it in pointwise operators. Samples are taken for the outermost dim where they come first.
    single = [cut for cut in x.partition.cuts if cut is not None and cut.single]
    if len(single) > 1 or memory_format is not torch.contiguous_format:
        return alike if not single else None
    known = not single or (single[0] is x.partition.cuts[0] and single[0].axis == "data")
    return alike if known or not alike else None


@register(torch.is_tensor, family="attribute", merged=True)
def is_tensor(obj: object) -> bool:
    """Is always true."""
    return isinstance(obj, torch.Tensor)


@register(torch.numel, family="attribute", lazy=True, merged=True)
def numel(input: Sharded) -> int:
    """Counts the elements of the global tensor."""
    return input.numel()


_NBYTES: Any = torch.Tensor.nbytes


@register(_NBYTES.__get__, family="attribute", lazy=True, merged=True)
def nbytes(self: Sharded) -> int:
    """Counts the bytes of the global tensor."""
    return self.numel() * self.itemsize


PythonNumber = float | int | bool | complex


def _register_number(method: Callable[[torch.Tensor], PythonNumber]) -> None:
    @register(method, family="value")
    def rule(self: Sharded) -> PythonNumber:
        """Returns a single element, equal on all ranks; refuses more."""
        if self.numel() != 1 or self.partition.cut_dims:
            raise refuse(method, (self,), {})
        return method(self.local)


for _method in ("item", "__float__", "__int__", "__index__", "__bool__"):
    _register_number(getattr(torch.Tensor, _method))


def _register_whole(method: Callable[..., Any]) -> None:
    @register(method, family="value")
    def rule(self: Sharded, *args: Any, **kwargs: Any) -> Any:
        """Returns the values of a tensor that is not cut; refuses one that is."""
        if self.partition.cut_dims:
            raise UnsupportedOp(
                f"{op_name(method)}: this rank holds only a part of the tensor\n    Sharded "
                f"{self.partition} on {self.grid}\n    take all of it, on every rank, by x.full(), "
                "or this rank's block by x.local"
            )
        return method(self.local, *args, **kwargs)


# What NumPy, matplotlib and torch.save ask for.
for _method in ("numpy", "tolist", "__array__", "__reduce_ex__"):
    _register_whole(getattr(torch.Tensor, _method))
