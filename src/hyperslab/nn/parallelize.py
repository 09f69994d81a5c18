"""`parallelize`: any module, in place, for cut inputs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hyperslab.comm import Grid
from hyperslab.errors import LayoutError
from hyperslab.tensor import Sharded
from hyperslab.tensor.sharded import Policy

STATISTICS = ("grid", "replica")
# torch 2.13 renamed the option; the old name warns.
_NEW_NAME = "forward_sync_buffers"
_DDP_OPTIONS = inspect.signature(DistributedDataParallel).parameters
# Every rank computes the same running statistics: nobody's have to be sent.
_KEEP_BUFFERS: dict[str, Any] = {
    _NEW_NAME if _NEW_NAME in _DDP_OPTIONS else "broadcast_buffers": False
}


def parallelize(
    module: nn.Module, grid: Grid, *, batch_norm: str = "grid", find_unused_parameters: bool = False
) -> nn.Module:
    """Make a module run on cut tensors and its gradients the serial ones; returns the same module.

    Parameters and buffers become equal to those of rank 0, and move to the grid's device. After
    ``loss.backward()`` every ``.grad`` is the gradient of the one global loss: torch's
    DistributedDataParallel averages over all ranks, bucketed and overlapped with the backward
    pass. Names in the state dict do not change. ``module.no_sync()`` is a context in which
    gradients accumulate without communication, as DistributedDataParallel has it.

    Args:
        module: any module; its forward takes `Sharded` inputs.
        grid: the ranks.
        batch_norm: statistics over the whole ``"grid"``, which is the serial result, or per
            ``"replica"`` as in Oyama et al. 2020 (the running statistics are the replicas' mean).
        find_unused_parameters: pass True if some parameters take no part in a step's loss.

    Raises:
        LayoutError: the module is parallelised already, or ``batch_norm`` is unknown.
    """
    if batch_norm not in STATISTICS:
        raise LayoutError(f"batch_norm={batch_norm!r}; use one of {', '.join(STATISTICS)}")
    if "no_sync" in vars(module):
        raise LayoutError("the module is parallelised already")
    module.to(grid.device)
    if batch_norm != "grid":
        policy = Policy(batch_norm=batch_norm)
        module.register_forward_pre_hook(_policy_hook(policy), with_kwargs=True)
    _average_gradients(module, grid, find_unused_parameters)
    return module


class _Body(nn.Module):
    """A module's own forward, for DistributedDataParallel to wrap."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._forward = module.forward
        self._running = False
        for part in module.modules():
            if part is not module and next(part.parameters(recurse=False), None) is not None:
                part.register_forward_pre_hook(self._check, with_kwargs=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._running = True
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._running = False

    def _check(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A part called by itself would get gradients that nobody averages: partial ones."""
        recomputed = torch._C._current_graph_task_id() != -1  # activation checkpointing
        if self._running or recomputed or not torch.is_grad_enabled():
            return
        if any(isinstance(value, Sharded) for value in (*args, *kwargs.values())):
            raise LayoutError(
                f"{type(part).__name__} was called outside the forward of the parallelised "
                f"{type(self.module).__name__}, so its gradients would not be averaged\n"
                "    call the module that parallelize returned, parallelize this part by itself "
                "instead, or use torch.no_grad()"
            )


def _average_gradients(module: nn.Module, grid: Grid, find_unused: bool) -> None:
    if grid.size > 1:
        _make_equal(module)
    if grid.size == 1 or not any(p.requires_grad for p in module.parameters()):
        module.no_sync = torch.enable_grad  # type: ignore[assignment]
        return
    ddp = DistributedDataParallel(
        _Body(module),
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=True,
        **_KEEP_BUFFERS,
    )
    module.forward = ddp.forward  # type: ignore[method-assign]
    module.no_sync = ddp.no_sync  # type: ignore[assignment]


def _make_equal(module: nn.Module) -> None:
    """What DistributedDataParallel leaves out: buffers and frozen parameters."""
    frozen = (p.data for p in module.parameters() if not p.requires_grad)
    for tensor in (*frozen, *module.buffers()):
        dist.broadcast(tensor, src=0)


def _policy_hook(policy: Policy) -> Any:
    def apply(value: Any) -> Any:
        if isinstance(value, Sharded):
            return Sharded.from_local(value.local, value.partition, value.grid, policy)
        return value

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(apply, args)), {key: apply(value) for key, value in kwargs.items()}

    return hook
