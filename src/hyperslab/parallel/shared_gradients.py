"""The average of gradients over ranks that share memory, where they are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from hyperslab.comm import shared_buffers, shared_channels

LINE = 64  # [B] at which a gradient begins: a cache line


class SharedGradients:
    """What DistributedDataParallel does for the gradients of a module, of ranks of one machine.

    Every ``.grad`` is a view of memory that all ranks map. When the last gradient of a backward
    pass is there, each rank averages its share of the numbers, in place: nothing is sent. A rank
    of the CPU has no other core that could do it meanwhile.

    ``require_backward_grad_sync``: whether the next forward's gradients will be averaged, as
    DistributedDataParallel has it.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], buffers: Sequence[torch.Tensor], rank: int
    ) -> None:
        """``buffers`` are bytes, one of each rank, and as many as `bytes_needed`."""
        self.require_backward_grad_sync = True
        self._parts: list[list[torch.Tensor]] = []  # of each dtype, by rank
        self._views: dict[int, torch.Tensor] = {}
        begin = 0
        for dtype in _dtypes(parameters):
            of_dtype = [p for p in parameters if p.dtype == dtype]
            end = begin + bytes_needed(of_dtype)
            parts = [buffer[begin:end].view(dtype) for buffer in buffers]
            self._parts.append(parts)
            self._make_views(of_dtype, parts[rank])
            begin = end

    def _make_views(self, parameters: Sequence[nn.Parameter], whole: torch.Tensor) -> None:
        begin = 0
        for parameter in parameters:
            flat = whole[begin : begin + parameter.numel()]
            self._views[id(parameter)] = _as(parameter, flat)
            begin += bytes_needed([parameter]) // parameter.element_size()

    def collect(self, parameter: torch.Tensor) -> None:
        """Move a gradient to where it is averaged, unless it has been accumulated there."""
        view = self._views[id(parameter)]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view

    def average(self) -> None:
        """All gradients have been collected, on all ranks.

        Raises:
            CommError: a rank died or did not answer within the time limit.
        """
        shared = shared_channels()
        assert shared is not None
        for parts in self._parts:
            shared.average_shown(parts, "the average of the gradients")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients accumulate without communication."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


def share_gradients(module: nn.Module, rank: int) -> SharedGradients | None:
    """For the trainable parameters of a module; None where ranks cannot share as much memory.

    All ranks call this.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    buffers = shared_buffers(bytes_needed(parameters))
    return None if buffers is None else SharedGradients(parameters, buffers, rank)


def bytes_needed(parameters: Sequence[torch.Tensor]) -> int:
    """Of their gradients, each on cache lines of its own.

    >>> bytes_needed([torch.zeros(3), torch.zeros(17)])
    192
    """
    return sum(-(-p.nbytes // LINE) * LINE for p in parameters)


def _dtypes(parameters: Sequence[nn.Parameter]) -> list[torch.dtype]:
    return list(dict.fromkeys(p.dtype for p in parameters))


def _as(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """In the parameter's memory format, where that leaves no gaps."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)
