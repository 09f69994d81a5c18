"""Runs Lightning's Trainer on a grid; the one module here that needs Lightning.

``Trainer(strategy=GridStrategy(depth=2), devices=2)``; see docs/coming-from/lightning.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from hyperslab.comm import Grid
from hyperslab.errors import LayoutError


class GridStrategy(DDPStrategy):
    """Deals samples out to replicas, not to ranks, and averages no gradient a second time.

    The LightningModule parallelises its network in ``configure_model``, with ``strategy.grid``.
    What adds up over ranks is refused: every one of them has the whole of a loss or ``x.full()``.
    ``options`` are DDPStrategy's.
    """

    def __init__(
        self, data: int = 1, depth: int = 1, height: int = 1, width: int = 1, **options: Any
    ):
        known = {*signature(DDPStrategy).parameters, *signature(DistributedDataParallel).parameters}
        if unknown := options.keys() - known:  # DDPStrategy keeps whatever it gets
            raise LayoutError(
                f"GridStrategy takes no argument {min(unknown)!r}\n    it takes data, depth, "
                "height, width and those of DDPStrategy"
            )
        super().__init__(**options)
        self.extents: Any = {"data": data, "depth": depth, "height": height, "width": width}

    def setup_distributed(self) -> None:
        super().setup_distributed()
        self.grid = Grid(**self.extents)
        self.grid.looks_for_metrics = False  # they are looked at below

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.grid.data, "rank": self.grid.coords["data"]}

    def configure_ddp(self) -> None:
        """Look whether the module is fit for a grid, in place of DistributedDataParallel."""
        assert self.model is not None
        if not any("no_sync" in vars(part) for part in self.model.modules()):
            raise LayoutError(
                f"no part of {type(self.model).__name__} is parallelised\n    in configure_model: "
                "self.net = hs.parallelize(self.net, self.trainer.strategy.grid)"
            )
        for name, part in self.model.named_modules():
            if isinstance(part, Metric) and part.process_group is None and part.sync_on_compute:
                raise LayoutError(
                    f"the metric {name} adds up over all ranks, but each rank has the whole of "
                    f"x.full()\n    make it as {type(part).__name__}"
                    "(process_group=grid.process_group())"
                )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let gradients accumulate without communication: ``accumulate_grad_batches``."""
        assert self.model is not None
        with ExitStack() as stack:
            for part in self.model.modules():
                if "no_sync" in vars(part):
                    stack.enter_context(part.no_sync())
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> torch.Tensor:
        if reduce_op == "sum" and torch.is_floating_point(tensor):  # Lightning's own are integers
            raise LayoutError(
                "self.log(reduce_fx='sum', sync_dist=True) would count a value that all ranks "
                "share once per rank\n    use sync_dist=False: losses and x.full() are of all "
                "samples already"
            )
        return super().reduce(tensor, group, reduce_op)
