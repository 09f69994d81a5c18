"""How far apart the surfaces of predicted and true classes are, in the samples of an evaluation."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray

from hyperslab.comm.agreement import from_main
from hyperslab.data import Dataset
from hyperslab.data.store.budget import free_memory
from hyperslab.errors import DataError, HyperslabError
from hyperslab.metrics.surface import (
    TOLERANCE,
    SurfaceScores,
    bytes_to_measure,
    monai_metrics,
    summary,
    surface_scores,
)
from hyperslab.tensor import Sharded
from hyperslab.tensor.main_rank import gather_to_main

log = logging.getLogger("hyperslab")

SampleSurfaces = dict[str, dict[str, SurfaceScores]]
"""By sample, by class; the background has none."""


@dataclass(frozen=True, slots=True)
class SurfacePolicy:
    """Whether surfaces are measured, and their ``tolerance`` [mm].

    Raises:
        DataError: the tolerance is negative.
    """

    wanted: bool = True
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise DataError(f"tolerance {self.tolerance:g} mm: needs to be >= 0")


@dataclass
class Surfaces:
    """Measures them, sample after sample, on the main rank, which holds both masks of one then.

    ``left_out``: why some or all were not measured.
    """

    data: Dataset
    policy: SurfacePolicy
    found: SampleSurfaces = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """All ranks find the same, as they have the same libraries and files."""
        self.wanted = self.policy.wanted
        if not self.wanted:
            return
        if from_main(lambda: self.data.source.voxel_size(self.data.schedule.samples[0])) is None:
            self.left_out.append("the files do not say how large a voxel is")
            self.wanted = False
            return
        try:
            from_main(monai_is_there)
        except HyperslabError as error:
            self.left_out.append(str(error))
            self.wanted = False

    def add(self, predicted: Sharded, true: Sharded) -> None:
        """The samples of the mini-batch last shown, (B, D, H, W) both; every rank calls it.

        Distribution scheme: 1. both masks are collected on the main rank, as bytes, 2. which
        measures them while the others go on to the next sample.
        """
        if not self.wanted:
            return
        masks = gather_to_main(predicted)
        truth = gather_to_main(true.like(true.local.to(torch.uint8), true.partition))
        if masks is None or truth is None:
            return
        for sample, mask, real in zip(self.data.shown, masks, truth, strict=True):
            self._measure(sample, mask, real)

    def _measure(self, sample: int, predicted: NDArray[Any], true: NDArray[Any]) -> None:
        name = self.data.source.names[sample]
        voxel = self.data.source.voxel_size(sample)
        if voxel is None:
            self.left_out.append(f"{name}: its file does not say how large a voxel is")
            return
        needed = bytes_to_measure(true, predicted)
        if needed > (free := free_memory()):
            gib = 1 << 30
            self.left_out.append(
                f"{name}: measuring it takes {needed / gib:.1f} GiB, and {free / gib:.1f} are free"
            )
            return
        self.found[name] = {
            of: surface_scores(true, predicted, label, voxel, self.policy.tolerance)
            for label, of in enumerate(self.data.classes)
            if label
        }

    def result(self) -> tuple[SampleSurfaces, list[str]]:
        """What was found, and why some was not; the same on every rank, which all call it."""
        found, left_out = from_main(lambda: (self.found, self.left_out))
        if self.data.grid.is_main and self.policy.wanted:
            for words in left_out:
                log.warning("surface distances are left out: %s", words)
        return found, left_out


def monai_is_there() -> None:
    """Nothing, if MONAI is; raises what `monai_metrics` does."""
    monai_metrics()


def summaries(found: SampleSurfaces, classes: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """By class but the background, over all samples that were measured."""
    return {name: summary([by[name] for by in found.values()]) for name in classes[1:]}
