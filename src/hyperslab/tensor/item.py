"""A tensor that is not cut gives its values to Python, NumPy and files, as any tensor does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyperslab.errors import UnsupportedOp
from hyperslab.tensor.dispatch import op_name, refuse, register
from hyperslab.tensor.sharded import Sharded

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


def _register_whole(method: Callable[..., Any]) -> None:
    @register(method, family="value")
    def rule(self: Sharded, *args: Any, **kwargs: Any) -> Any:
        """Of a tensor that is not cut, on one rank say; of one that is refused."""
        if self.partition.cut_dims:
            raise UnsupportedOp(
                f"{op_name(method)}: this rank holds a part of the tensor only\n    Sharded "
                f"{self.partition} on {self.grid}\n    take all of it, on every rank, by x.full(), "
                "or this rank's block by x.local"
            )
        return method(self.local, *args, **kwargs)


# What NumPy, matplotlib and torch.save ask for.
for _method in ("numpy", "tolist", "__array__", "__reduce_ex__"):
    _register_whole(getattr(torch.Tensor, _method))
