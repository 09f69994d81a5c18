"""The network of a recipe, ours or anybody's, for the data that there are."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hyperslab import models
from hyperslab.checkpoint.data_card import DataCard
from hyperslab.errors import RecipeError
from hyperslab.parallel.recompute import recompute_stages
from hyperslab.recipe.choices import choose
from hyperslab.recipe.schema import CosmoFlowSection, Recipe, UNet3DSection
from hyperslab.train.parts.given import NOTHING_GIVEN, Given
from hyperslab.train.parts.networks import from_target, rebuilt


def build_network(recipe: Recipe, about: DataCard, given: Given = NOTHING_GIVEN) -> torch.nn.Module:
    """The recipe's network for such data; its weights come from torch's generator.

    Raises:
        RecipeError: the network is for another kind of data, or for volumes of another size; or of
            a target what `Maker` raises.
    """
    config = recipe.model
    if config.segments not in (None, bool(about.classes)):
        raise RecipeError(of_another_kind(recipe, about))
    if given.model is not None:
        return given.model
    model = choose(MODELS, config.name, "model.name")(recipe, about)
    if recipe.memory == "recompute":
        recompute_stages(model)
    return model


def of_another_kind(recipe: Recipe, about: DataCard) -> str:
    """The words for data that network or loss are not made for."""
    found = "a class for every voxel" if about.classes else "parameters and no classes"
    remedy = (
        "model.name=unet3d and loss=dice_cross_entropy"
        if about.classes
        else "model.name=cosmoflow and loss=mse"
    )
    if recipe.data.synthetic is not None:
        remedy += f", or data.synthetic.{'targets=4' if about.classes else 'classes=3'}"
    return (
        f"{recipe.data.where} holds volumes with {found}, for which "
        f"{_words_of(recipe)} are not made\n    use {remedy}"
    )


def _words_of(recipe: Recipe) -> str:
    loss = recipe.loss if isinstance(recipe.loss, str) else recipe.loss.target
    if recipe.model.segments is None:
        return f"loss={loss} is"
    return f"model.name={recipe.model.name} and loss={loss}"


def _unet3d(recipe: Recipe, about: DataCard) -> torch.nn.Module:
    config = recipe.model
    assert isinstance(config, UNet3DSection)
    channels, *extents = about.shape
    if min(extents) >> config.levels == 0:
        raise RecipeError(
            f"model.levels={config.levels} needs volumes of at least {1 << config.levels} voxels "
            f"along each side, but they have {extents}"
        )
    return models.UNet3D(
        channels, len(about.classes), channels=config.channels, levels=config.levels
    )


def _cosmoflow(recipe: Recipe, about: DataCard) -> torch.nn.Module:
    config = recipe.model
    assert isinstance(config, CosmoFlowSection)
    channels, *extents = about.shape
    width = config.width or extents[0]
    if extents != [width] * 3:
        raise RecipeError(
            f"{recipe.data.where} holds volumes of {extents} voxels but the model takes "
            f"{[width] * 3}\n    set model.width or data.subvolume"
        )
    try:
        return models.CosmoFlow(
            width,
            variant=config.variant,
            in_channels=channels,
            outputs=len(about.parameters.names),
            batch_norm=config.batch_norm,
            dropout=config.dropout,
        )
    except ValueError as error:
        raise RecipeError(f"model.width, model.variant: {error}") from None


MODELS: dict[str, Callable[[Recipe, DataCard], torch.nn.Module]] = {
    "cosmoflow": _cosmoflow,
    "unet3d": _unet3d,
    "target": from_target,
    "python": rebuilt,
}
"""By ``model.name``; each takes the recipe and what the data are."""
