"""``torch.autograd``: gradients on request, and backward passes."""

from hyperslab.ops.autograd import backward, functions, grad

__all__ = ["backward", "functions", "grad"]
