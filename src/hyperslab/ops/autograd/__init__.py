"""``torch.autograd``: gradients on request, and backward passes."""

from hyperslab.ops.autograd import backward, grad

__all__ = ["backward", "grad"]
