"""What a cut tensor says about itself: attributes that are the same for block and whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyperslab.tensor.dispatch import register
from hyperslab.tensor.sharded import Sharded

PROPERTIES = """
dtype device layout requires_grad grad_fn is_leaf is_cpu is_cuda is_meta is_mkldnn is_mps is_nested
is_quantized is_sparse is_sparse_csr is_xpu itemsize names output_nr retains_grad _version
_backward_hooks
""".split()

METHODS = """
element_size get_device is_complex is_conj is_floating_point is_inference is_neg is_signed
requires_grad_ register_post_accumulate_grad_hook
""".split()


OF_BOTH = "Of the block and the whole alike."
MARKS = "Asks or marks the block."


def _register_all() -> None:
    for name in PROPERTIES:
        descriptor = getattr(torch.Tensor, name, None)
        for accessor in ("__get__", "__set__"):
            method = getattr(descriptor, accessor, None)
            if method is not None:
                register(method, family="attribute", doc=OF_BOTH, merged=True)(method)
    for name in METHODS:
        for space in (torch.Tensor, torch):
            function = getattr(space, name, None)
            if callable(function):
                note = register(function, family="attribute", doc=MARKS, merged=True)
                note(function)


_register_all()


@register(torch.Tensor.register_hook, family="attribute", merged=True)
def register_hook(self: Sharded, hook: Callable[[torch.Tensor], Any]) -> Any:
    """Asks or marks the block."""
    self.check_on_path("register_hook")
    return torch.Tensor.register_hook(self, hook)


@register(torch.Tensor.retain_grad, family="attribute", merged=True)
def retain_grad(self: Sharded) -> None:
    """Asks or marks the block."""
    self.check_on_path("retain_grad")
    torch.Tensor.retain_grad(self)


@register(torch.Tensor.is_contiguous, family="attribute", merged=True)
def is_contiguous(
    self: Sharded, memory_format: torch.memory_format = torch.contiguous_format
) -> bool:
    """Of the block, in a memory format."""
    return self.local.is_contiguous(memory_format=memory_format)


@register(torch.is_tensor, family="attribute", merged=True)
def is_tensor(obj: object) -> bool:
    """Always."""
    return isinstance(obj, torch.Tensor)
