"""From a recipe to its data and its network; training and evaluation build them alike."""

from __future__ import annotations

import hashlib
import json

import torch

from hyperslab import data as universes
from hyperslab.comm import Grid
from hyperslab.data.schedule import samples_of
from hyperslab.errors import RecipeError
from hyperslab.models import CosmoFlow
from hyperslab.nn import parallelize
from hyperslab.train.config import Recipe


def training_split(recipe: Recipe, data: universes.Dataset) -> list[int]:
    """The samples that training shows, whatever split ``data`` itself is."""
    source = data.source
    volumes = [source.volume(sample) for sample in range(len(source.names))]
    return samples_of(volumes, "train", recipe.data.fractions, recipe.data.seed)


def training_digest(recipe: Recipe, data: universes.Dataset) -> str:
    """The SHA-256 of the names of the training split and of the seed of its order."""
    names = [data.source.names[sample] for sample in training_split(recipe, data)]
    return hashlib.sha256(json.dumps([recipe.data.seed, names]).encode()).hexdigest()


def open_data(
    recipe: Recipe, grid: Grid, *, split: str, shuffle: bool | None = None
) -> universes.Dataset:
    """One split of the recipe's data; only training itself is shuffled and augmented."""
    data = recipe.data
    return universes.open(
        data.path,
        grid,
        batch_size=data.batch_size,
        split=split,
        seed=data.seed,
        shuffle=shuffle,
        channels=data.channels,
        transform=data.transform,
        augment=data.augment and split == "train" and shuffle is not False,
        subvolume=data.subvolume,
        prefetch=data.prefetch,
        fractions=data.fractions,
    )


def build_model(recipe: Recipe, data: universes.Dataset, grid: Grid) -> torch.nn.Module:
    """The recipe's network for this data, parallelised; its weights come from torch's generator.

    Raises:
        RecipeError: the volumes are no cubes, or of another width than the recipe or the
            variant takes.
    """
    channels, *extents = data.shape
    width = recipe.model.width or extents[0]
    if extents != [width] * 3:
        raise RecipeError(
            f"{recipe.data.path} holds volumes of {extents} voxels but the model takes "
            f"{[width] * 3}\n    set model.width or data.subvolume"
        )
    try:
        model = CosmoFlow(
            width,
            variant=recipe.model.variant,
            in_channels=channels,
            outputs=len(data.targets),
            batch_norm=recipe.model.batch_norm,
            dropout=recipe.model.dropout,
        )
    except ValueError as error:
        raise RecipeError(f"model.width, model.variant: {error}") from None
    return parallelize(model, grid, batch_norm=recipe.model.statistics)
