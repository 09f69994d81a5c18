"""When the gradients of a step would travel: the buckets of DistributedDataParallel."""

from __future__ import annotations

from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn

from hyperslab.trace.virtual import Messages

BUCKET = 25 << 20  # [B] of DistributedDataParallel's buckets, but for the first one
FIRST_BUCKET: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]


class Buckets:
    """The gradients of a module over virtual ranks, as DistributedDataParallel averages them.

    Its buckets are filled in the order in which gradients become ready (so it arranges them after
    the first step), and a full one leaves. They are always there: gradients are views of them.
    """

    def __init__(self, module: nn.Module, ranks: int, journal: Messages) -> None:
        self.ranks = tuple(range(ranks))
        self.journal = journal
        self.filled = 0
        self.limit = FIRST_BUCKET
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.views = {id(p): torch.empty_like(p) for p in self.parameters}

    def watch(self, stack: ExitStack) -> None:
        """From now on count gradients as they become ready, until ``stack`` is closed."""
        for parameter in self.parameters:
            hook = parameter.register_post_accumulate_grad_hook(self._ready)
            stack.callback(hook.remove)

    def finish(self) -> None:
        """At the end of a backward pass the last bucket leaves as it is."""
        self._leave()
        self.limit = FIRST_BUCKET

    def _leave(self) -> None:
        if self.filled:
            self.journal.sum(self.ranks, self.filled, "gradients", "the average of the gradients")
        self.filled = 0
        self.limit = BUCKET

    def _ready(self, parameter: torch.Tensor) -> None:
        view = self.views[id(parameter)]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
        self.filled += parameter.nbytes
        if self.filled >= self.limit:
            self._leave()
