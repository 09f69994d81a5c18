"""The one value of a tensor that has no more and is not cut, such as the loss of one sample."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import refuse

Number = float | int | bool | complex


def _register(method: Callable[[torch.Tensor], Number]) -> None:
    @register(method, family="value")
    def rule(self: Sharded) -> Number:
        """Of a single element, equal on all ranks; of more refused."""
        if self.numel() != 1 or self.partition.cut_dims:
            raise refuse(method, (self,), {})
        return method(self.local)


for _method in ("item", "__float__", "__int__", "__bool__"):
    _register(getattr(torch.Tensor, _method))
