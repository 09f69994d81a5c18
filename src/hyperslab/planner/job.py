"""Derives from a recipe what it asks of the ranks, whatever the grid: its network, data, batch.

Where the data are not there, they are what ``data.shape`` or the network's width says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from hyperslab.checkpoint.run_state import DataCard
from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.errors import RecipeError
from hyperslab.formats.source import Source
from hyperslab.formats.synthetic import SyntheticVolumes
from hyperslab.formats.views import selected
from hyperslab.planner.trace import Workload
from hyperslab.recipe.schema import GridSection, Recipe
from hyperslab.train.builders import data_card
from hyperslab.train.network import build_network, check_first_pass
from hyperslab.train.objective import build_objective
from hyperslab.train.optimizer import build_optimizer
from hyperslab.train.samples import samples_of_split
from hyperslab.train.step import PRECISIONS

VolumeShape = tuple[int, ...]

ASSUMED_SAMPLES = 128  # where there are no data: Oyama et al. 2020, section V-B


@dataclass(frozen=True, slots=True)
class GridJob:
    """Holds a recipe and the facts about its data that a plan needs.

    ``samples`` are those of the training split, ``validated`` those of the validation, ``shown``
    all that an epoch shows, the test among them where it is followed; ``voxel_bytes`` [B] are
    stored for a voxel of a channel, ``target_bytes`` [B] for the class of one, or for all numbers
    of a sample.
    ``assumed`` says what was taken for granted where there are no data.
    """

    recipe: Recipe
    about: DataCard
    samples: int
    validated: int
    shown: int
    voxel_bytes: int
    target_bytes: int
    assumed: str = ""

    @property
    def batch(self) -> int:
        return min(self.recipe.data.batch_size, self.samples * self.recipe.data.repeat)

    @property
    def accumulated(self) -> int:
        return self.recipe.optimizer.accumulate

    @property
    def steps(self) -> int:
        """Counts the steps of an epoch, which may show every sample to train on several times."""
        return -(-self.samples * self.recipe.data.repeat // (self.batch * self.accumulated))

    @property
    def inputs(self) -> VolumeShape:
        """Returns the global input's shape (N, C, D, H, W)."""
        return (self.batch, *self.about.shape)

    def box_bytes(self, extents: VolumeShape) -> int:
        """Computes the stored size [B] of a block of D, H, W extents, its target included."""
        voxels = math.prod(extents)
        targets = voxels * self.target_bytes if self.about.classes else self.target_bytes
        return voxels * self.about.shape[0] * self.voxel_bytes + targets

    def box_extents(self, grid: GridSection) -> VolumeShape:
        """Returns D, H, W of the largest block that a rank has of a sample."""
        cuts = zip(self.about.shape[1:], SPATIAL_AXES, strict=True)
        return tuple(-(-extent // getattr(grid, axis)) for extent, axis in cuts)

    def samples_each(self, grid: GridSection) -> int:
        """Returns the most samples of a mini-batch that a replica has."""
        return -(-self.batch // grid.data)

    def step_bytes(self, grid: GridSection) -> int:
        """Computes the stored size [B] of what a rank takes in for a step."""
        boxes = self.accumulated * self.samples_each(grid)
        return boxes * self.box_bytes(self.box_extents(grid))

    def whole_each(self, grid: GridSection) -> int:
        """Counts the samples of a mini-batch that the busiest rank reads whole; none if boxes."""
        if self.recipe.data.mode != "sample":
            return 0
        return -(-self.samples_each(grid) // (grid.size // grid.data))

    def read_bytes(self, grid: GridSection) -> int:
        """Computes what the busiest rank reads for a step, where that is not kept already [B]."""
        if whole := self.whole_each(grid):
            return self.accumulated * whole * self.box_bytes(self.about.shape[1:])
        return self.step_bytes(grid)

    def travelling(self, grid: GridSection) -> float:
        """Computes the boxes that the busiest store sends in a step, over those a rank takes in.

        They go to other replicas alone; of a whole sample they go to all other ranks.
        """
        if whole := self.whole_each(grid):
            sent = whole * (grid.size // grid.data - 1 / grid.data)
            return sent / self.samples_each(grid)
        kept = self.recipe.data.mode != "direct"
        return 1 - 1 / grid.data if kept else 0.0

    @property
    def reads_each_step(self) -> bool:
        """Tells if files are read in every epoch, and not in the first one alone."""
        return self.recipe.data.mode == "direct" and self.recipe.data.synthetic is None

    def workload(self) -> Workload:
        """Describes the job's step, to be traced."""
        recipe = self.recipe
        classes = self.about.classes
        numbers = len(self.about.parameters.names)
        return Workload(
            partial(_network, recipe, self.about),
            self.inputs,
            target=(self.batch, *self.about.shape[1:]) if classes else (self.batch, numbers),
            target_dtype=torch.int64 if classes else torch.float32,
            target_channels=not classes,
            loss=build_objective(recipe, self.about).loss,
            optimizer=partial(build_optimizer, recipe.optimizer),
            precision=PRECISIONS[recipe.precision],
            batch_norm=recipe.statistics,
            memory="tile" if recipe.memory == "auto" else recipe.memory,
            until=recipe.parallelize.until,
            gradients=recipe.parallelize.gradients,
        )

    def with_recipe(self, **changes: object) -> GridJob:
        """Returns the same job for a recipe that is changed in some keys."""
        return replace(self, recipe=self.recipe.model_copy(update=changes))


def _network(recipe: Recipe, about: DataCard) -> torch.nn.Module:
    """Builds the recipe's network; a first forward pass checks that it goes with the data."""
    model = build_network(recipe, about)
    if recipe.model.segments is None:
        check_first_pass(model, recipe, about)
    return model


def job_of(recipe: Recipe, shape: VolumeShape | None = None) -> GridJob:
    """Derives the job of a recipe, for its data or for volumes of ``shape`` (C, D, H, W).

    Where its data are not there, they are what ``data.shape`` or its network's width says. This
    process alone looks at them, and does not start to communicate.

    Raises:
        DataError: there are no data, and neither shape nor width.
    """
    data = recipe.data
    assumed = said = ""
    if shape is not None:
        assumed = f"volumes of {_product(shape)}, as asked for"
    elif not data.is_here:
        shape = recipe.expected_shape
        where = data.path or data.where
        said = "data.shape" if data.shape else "the recipe's width"
        assumed = f"{where} is not here: volumes of {_product(shape)}, as {said} says"
    if shape is not None:
        samples = max(ASSUMED_SAMPLES, 2 * recipe.data.batch_size)
        targets = 4 if recipe.data.targets is None else len(recipe.data.targets)
        source: Source = SyntheticVolumes(shape, samples, targets=targets, classes=_classes(recipe))
        if said == "data.shape":  # of whole volumes, as those of files are
            source = selected(source, None, None, data.subvolume)
        recipe = recipe.model_copy(update={"data": data.model_copy(update=_DRAWN_SPLITS)})
    else:
        source = data.chosen_volumes()
    splits = ("train", "validation", *(["test"] if recipe.follow_test else []))
    counts = [len(samples_of_split(recipe, source, split)) for split in splits]
    target = 1 if source.classes else 8 * len(source.parameters.names)
    voxel = source.dtype.itemsize
    train, validation = counts[:2]
    card = data_card(source)
    return GridJob(recipe, card, train, validation, sum(counts), voxel, target, assumed)


_DRAWN_SPLITS = dict.fromkeys(("counts", "train", "validation", "test", "fold", "folds")) | {
    "splits": "drawn"
}
"""Replaces the splits of a recipe without data: there are not as many volumes as it may count."""


def _classes(recipe: Recipe) -> int:
    """Counts the classes of made-up volumes: the data's, or as many as the loss is for."""
    if recipe.segments is not None:
        return 3 if recipe.segments else 0
    if recipe.data.is_here:
        return len(recipe.data.whole_volumes().classes)
    try:
        build_objective(recipe, data_card(SyntheticVolumes((1, 8, 8, 8), 1)))
    except RecipeError:
        return 3
    return 0


def _product(shape: VolumeShape) -> str:
    return " x ".join(map(str, shape))
