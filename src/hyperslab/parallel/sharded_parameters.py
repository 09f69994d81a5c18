"""Parameters that something else has sharded: refused, see docs/design/0026-fsdp.md."""

from __future__ import annotations

import sys

from torch import nn

from hyperslab.errors import LayoutError


def refuse_sharded_parameters(module: nn.Module) -> None:
    """
    Raises:
        LayoutError: parameters are sharded, by `fully_shard` (which makes them whole within a
            forward pass) or as DTensors.
    """
    # Whoever has used them has imported them, which takes a second.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    by_fsdp = fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in module.modules())
    cut = sys.modules.get("torch.distributed.tensor")
    if by_fsdp or (
        cut is not None and any(isinstance(own, cut.DTensor) for own in module.parameters())
    ):
        raise LayoutError(
            f"the parameters of {type(module).__name__} are sharded (fully_shard, or tensor "
            "parallelism), but hyperslab.parallelize needs whole ones\n    to shard what the "
            "optimizer keeps, use torch.distributed.optim.ZeroRedundancyOptimizer"
        )
