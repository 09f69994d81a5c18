"""A sampler by replica: all ranks that share a sample are given the same ones."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from hyperslab.errors import LayoutError


class ReplicaSampler(DistributedSampler[Any]):
    """Every ``replicas``-th sample from the ``replica``-th on; made by `Grid.sampler`.

    A mini-batch of b on each replica is, all together, the next b times ``replicas`` samples of
    one order, which is that of torch's DistributedSampler: the same on every grid.
    """

    def __init__(
        self,
        dataset: Sized,
        replicas: int,
        replica: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        over = len(dataset) % replicas
        if over and not drop_last:
            raise LayoutError(
                f"{len(dataset)} samples cannot be dealt out evenly to {replicas} replicas: {over} "
                "would be left, and no sample is shown twice\n    drop_last=True leaves "
                f"{over} out, others in each epoch if shuffled; or take grid.data that divides "
                f"{len(dataset)}"
            )
        if len(dataset) < replicas:
            raise LayoutError(f"{len(dataset)} samples are fewer than {replicas} replicas")
        super().__init__(
            dataset,  # type: ignore[arg-type]
            num_replicas=replicas,
            rank=replica,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
