"""Measure a network that gives every voxel its class: how its masks overlap with the true ones.

Legend: N samples, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from hyperslab.atomic_files import created_aside, write_csv, write_json
from hyperslab.data import Dataset
from hyperslab.evaluate.sliding_windows import WindowedModel, WindowPolicy
from hyperslab.evaluate.surfaces import SampleSurfaces, SurfacePolicy, Surfaces, summaries
from hyperslab.metrics.confusion import (
    Counts,
    Scores,
    count,
    predicted_classes,
    scores_of,
    sum_over_ranks,
)
from hyperslab.recipe.schema import Recipe
from hyperslab.tensor import Sharded
from hyperslab.tensor.main_rank import gather_to_main
from hyperslab.train.objective import MeansOfMetrics
from hyperslab.train.precision import autocast

Masks = dict[str, NDArray[np.uint8]]

NO_SURFACES = SurfacePolicy(wanted=False)

SHOWN = 3
"""Samples whose masks are kept for the report."""


@dataclass(frozen=True, slots=True)
class ClassEvaluation:
    """The scores of one checkpoint on one split.

    ``confusions`` (N, C, C) are those of ``samples``. ``masks`` (D, H, W) of some of them are on
    the main rank only. ``facts`` say how it all came about.
    """

    classes: tuple[str, ...]
    samples: tuple[str, ...]
    confusions: Counts
    masks: Masks
    facts: dict[str, Any] = field(default_factory=dict)
    surfaces: SampleSurfaces = field(default_factory=dict)

    @property
    def confusion(self) -> Counts:
        """Of all samples together (C, C): the row is the true class."""
        total: Counts = self.confusions.sum(0)
        return total

    @property
    def scores(self) -> dict[str, Scores]:
        """By class, those of all voxels together, and ``dice_mean``: see `mean_dice`.

        And, where surfaces were measured, of every class but the background: see `summary`.
        """
        means = mean_dice(self.confusions, self.classes)
        surfaces = summaries(self.surfaces, self.classes) if self.surfaces else {}
        return {
            name: {"dice_mean": means[name], **scores, **surfaces.get(name, {})}
            for name, scores in scores_of(self.confusion, self.classes).items()
        }

    def write(self, folder: Path) -> None:
        """``metrics.json``, ``metrics.csv``, ``confusion.csv``, ``samples.csv``, ``masks.npz``."""
        scores = self.scores
        classes = self.classes
        keys = list(dict.fromkeys(key for row in scores.values() for key in row))
        rows = (
            [name, *(row.get(key, float("nan")) for key in keys)] for name, row in scores.items()
        )
        write_csv(folder / "metrics.csv", ["class", *keys], rows)
        rows = ([n, *row] for n, row in zip(classes, self.confusion.tolist(), strict=True))
        write_csv(folder / "confusion.csv", ["true \\ predicted", *classes], rows)
        write_csv(folder / "samples.csv", *self._by_sample())
        arrays: dict[str, Any] = {f"mask_{i}": mask for i, mask in enumerate(self.masks.values())}
        if len({mask.shape for mask in self.masks.values()}) == 1:
            arrays = {"masks": np.stack(list(self.masks.values()))}
        with created_aside(folder / "masks.npz") as file:
            np.savez_compressed(file, samples=np.array(list(self.masks)), **arrays)
        content = {"classes": scores, "confusion": self.confusion.tolist(), **self.facts}
        write_json(folder / "metrics.json", content)

    def _by_sample(self) -> tuple[list[str], list[list[object]]]:
        kinds = ("dice", "iou", "precision", "recall")
        head = ["sample", *(f"{kind}_{name}" for name in self.classes for kind in kinds)]
        if self.surfaces:
            of = ("presence", "hausdorff_95_mm", "average_surface_distance_mm", "surface_dice")
            head += [f"{kind}_{name}" for name in self.classes[1:] for kind in of]
        rows: list[list[object]] = []
        for sample, confusion in zip(self.samples, self.confusions, strict=True):
            scores = scores_of(confusion, self.classes).values()
            cells = [score[kind] for score in scores for kind in kinds]
            rows.append([sample, *cells, *self._surfaces_of(sample)])
        return head, rows

    def _surfaces_of(self, sample: str) -> list[object]:
        """The cells of a sample, empty where nothing was measured."""
        if not self.surfaces:
            return []
        found = self.surfaces.get(sample, {})
        each = (found.get(name) for name in self.classes[1:])
        return [cell for one in each for cell in ([None] * 4 if one is None else astuple(one))]


def mean_dice(confusions: Counts, classes: Sequence[str]) -> dict[str, float]:
    """By class, the mean of the samples' own Dice, over the samples that have such voxels.

    NaN where none has. Every sample counts alike here, a large organ no more than a small one.
    """
    of_samples = [scores_of(confusion, classes) for confusion in confusions]
    there = confusions.sum(2) > 0
    return {
        name: float(np.mean(values)) if values else float("nan")
        for i, name in enumerate(classes)
        for values in [[s[name]["dice"] for s, t in zip(of_samples, there[:, i], strict=True) if t]]
    }


@torch.no_grad()
def evaluate_segmentation(
    model: torch.nn.Module,
    data: Dataset,
    recipe: Recipe,
    policy: SurfacePolicy = NO_SURFACES,
    metrics: MeansOfMetrics | None = None,
    windows: WindowPolicy | None = None,
) -> ClassEvaluation:
    """Predict every sample once; the counts are the same on every rank. ``metrics`` see them, too.

    With ``windows`` in windows that overlap.

    Distribution scheme: 1. each rank counts its boxes of every sample, 2. one sum over all ranks
    in the end; 3. the masks to be shown are collected on the main rank, as bytes, and where
    surfaces are to be measured all of them, one after the other.
    """
    model.eval()
    predicting = model if windows is None else WindowedModel(model, windows)
    surfaces = Surfaces(data, policy)
    grid = data.grid
    size = len(data.classes)
    names: list[str] = []
    counts: list[torch.Tensor] = []
    masks: list[NDArray[np.uint8]] = []
    for x, y in data.epoch(0):
        stored = data.source.unpadded(data.shown[0])
        added = stored != tuple(x.shape[2:])  # what was added counts for nothing
        inside = (slice(None), *(slice(extent) for extent in stored))
        if added and windows is not None:
            x = cast(Sharded, x[slice(None), *inside])
        with autocast(grid.device, recipe.precision):
            prediction = predicting(x)
        if added:
            prediction = cast(Sharded, prediction[slice(None), *inside])
            y = cast(Sharded, y[inside])
        if metrics is not None:
            metrics.add(prediction, y)
        predicted = predicted_classes(prediction)
        counts.append(count(predicted, y, size))
        surfaces.add(predicted, y)
        if len(names) < SHOWN:
            whole = gather_to_main(predicted)
            masks += [] if whole is None else list(whole)
        names += data.shown_names
    confusions = sum_over_ranks(torch.cat(counts), grid).cpu().numpy()
    shown = dict(zip(names, masks[:SHOWN], strict=False))
    found, left_out = surfaces.result()
    facts: dict[str, Any] = {}
    if policy.wanted:
        facts["surfaces"] = {
            "tolerance_mm": policy.tolerance,
            "samples": len(found),
            "left_out": left_out,
        }
    if windows is not None:
        facts["windows"] = windows.facts
    if data.source.channel_names:
        facts["channels"] = list(data.source.channel_names)
    return ClassEvaluation(data.classes, tuple(names), confusions, shown, facts, found)
