"""Targets of other files as the network was shown its own: by the ranges of its training."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hyperslab.checkpoint.data_card import DataCard
from hyperslab.checkpoint.save_load import read_extra
from hyperslab.data import Dataset
from hyperslab.errors import DataError
from hyperslab.recipe.schema import Recipe


def card_of(checkpoint: Path, *, trust_pickle: bool = False) -> DataCard | None:
    """What a checkpoint's network was trained on; None where it does not say so.

    Raises:
        CheckpointError: it is corrupt.
    """
    extra = read_extra(checkpoint, trust_pickle=trust_pickle)
    return DataCard.from_state(extra["about"]) if "about" in extra else None


def as_trained(recipe: Recipe, data: Dataset, about: DataCard | None) -> Recipe:
    """The recipe with the ranges of the training, where the data have others; else itself.

    Targets of tables and keys are scaled by the least and the greatest of all samples, unless a
    recipe says otherwise: of other samples these are other numbers.

    Raises:
        DataError: the targets are not those of the training.
    """
    if about is None or not data.source.targets_apart:
        return recipe
    trained, found = about.parameters, data.parameters
    if trained.names != found.names:
        raise DataError(
            f"{recipe.data.where} has the targets {', '.join(found.names)} but the network was "
            f"trained on {', '.join(trained.names)}\n    data.columns names the columns of a "
            "table, data.targets chooses some of them"
        )
    alike = np.allclose(trained.centre, found.centre, rtol=1e-12, atol=0)
    if alike and np.allclose(trained.scale, found.scale, rtol=1e-12, atol=0):
        return recipe
    ranges = {**(recipe.data.ranges or {}), **trained.ranges}
    section = recipe.data.model_copy(update={"ranges": ranges})
    return recipe.model_copy(update={"data": section})
