"""This rank's part of a mini-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hyperslab.data.sample_assembly import TargetKind
from hyperslab.data.store.boxes import SampleBox
from hyperslab.data.store.plan import SampleBoxes
from hyperslab.formats.source import Source
from hyperslab.geometry import Partition


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """This rank's box (b, C, d, h, w) of a mini-batch in its storage type, and its targets.

    These are numbers (b, P) float64 or the classes of the voxels (b, d, h, w) as uint8. ``kept``:
    both are the store's own, which must not be changed.
    """

    values: torch.Tensor
    targets: torch.Tensor
    partition: Partition  # of the values
    target_partition: Partition
    samples: tuple[int, ...] = ()  # of the whole mini-batch
    kept: bool = False


class BatchAllocator:
    """Makes room for the local batches of a data set; on CUDA, page-locked.

    The samples of a mini-batch are of one shape.
    """

    def __init__(self, source: Source, boxes: SampleBoxes, kind: TargetKind) -> None:
        self.source = source
        self.boxes = boxes
        self.grid = boxes.grid
        maps = boxes.by_shape.values()
        self.target_shapes = {found.shape: kind.shape(found.own.shape[1:]) for found in maps}
        self.whole_targets = {found.shape: kind.shape(found.shape[1:]) for found in maps}
        self.value_dtype = _torch_dtype(source.dtype)
        self.target_dtype = _torch_dtype(kind.dtype)
        self.pinned = self.grid.device.type == "cuda"

    def empty(self, samples: list[int], count: int) -> LocalBatch:
        """Room for the ``count`` samples of a mini-batch that this rank computes."""
        boxes = self.boxes.maps[samples[0]]
        shape = boxes.own.shape
        values = torch.empty((count, *shape), dtype=self.value_dtype, pin_memory=self.pinned)
        targets = torch.empty(
            (count, *self.target_shapes[boxes.shape]),
            dtype=self.target_dtype,
            pin_memory=self.pinned and self.source.classes != (),
        )
        return self._batch(values, targets, samples, kept=False)

    def around(self, samples: list[int], box: SampleBox) -> LocalBatch:
        """The only sample that this rank computes, where the store has it: no copy."""
        values = torch.from_numpy(box.values)[None]
        return self._batch(values, torch.from_numpy(box.target)[None], samples, kept=True)

    def _batch(
        self, values: torch.Tensor, targets: torch.Tensor, samples: list[int], *, kept: bool
    ) -> LocalBatch:
        count = len(samples)
        shape = self.boxes.maps[samples[0]].shape
        partition = self.grid.partition((count, *shape))
        channels = not self.source.classes
        cut = self.grid.partition((count, *self.whole_targets[shape]), channels=channels)
        return LocalBatch(values, targets, partition, cut, tuple(samples), kept)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
