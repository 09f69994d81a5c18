"""A trained network on the grid: from this rank's box of a volume to this rank's predictions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from hyperslab.checkpoint.data_card import DataCard
from hyperslab.checkpoint.save_load import load, read_extra
from hyperslab.comm import Grid
from hyperslab.comm.agreement import all_or_raise
from hyperslab.data.reader import check_values
from hyperslab.data.transforms import Transform, decode, transform_of
from hyperslab.errors import DataError, RecipeError
from hyperslab.predict.volumes import partition
from hyperslab.recipe.schema import Recipe
from hyperslab.tensor import Sharded
from hyperslab.train.build import build_model
from hyperslab.train.parts.given import NOTHING_GIVEN, Given
from hyperslab.train.precision import autocast


@dataclass(frozen=True, slots=True)
class Network:
    """A run's network; the run's data need not be there any more."""

    recipe: Recipe
    about: DataCard
    model: torch.nn.Module
    grid: Grid
    checkpoint: Path
    transform: Transform

    @classmethod
    def of(
        cls, recipe: Recipe, checkpoint: Path, grid: Grid, given: Given = NOTHING_GIVEN
    ) -> Network:
        """Every rank calls it.

        Raises:
            CheckpointError: the checkpoint is corrupt or of another network.
            DataError: it does not say what the network was trained on.
        """
        trust = recipe.checkpoint.trust_pickle
        extra = read_extra(checkpoint, trust_pickle=trust)
        if "about" not in extra:
            raise DataError(
                f"the checkpoint {checkpoint} does not say what its network was trained on; "
                "`hyperslab train` writes ones that do"
            )
        about = DataCard.from_state(extra["about"])
        model = build_model(recipe, about, grid, given)
        load(checkpoint, model, trust_pickle=trust)
        transform = transform_of(about.classes, recipe.data.transform, recipe.data.window)
        return cls(recipe, about, model.eval(), grid, checkpoint, transform)

    @torch.no_grad()
    def __call__(self, block: NDArray[Any], shape: tuple[int, ...], where: str) -> Sharded:
        """The prediction of one volume (C, D, H, W), of which ``block`` is this rank's box.

        Nothing is gathered: each layer holds what its rank's box needs. ``where`` names the volume.

        Raises:
            DataError: on every rank: values that cannot be right, or the network does not take
                extents like those of the volume.
            LayoutError: the volume is too small for the grid or the network.
        """
        all_or_raise(
            lambda: check_values(block, self.transform, where),
            failing=where,
            error=DataError,
        )
        values = torch.from_numpy(block).to(self.grid.device)
        x = decode(values, self.transform, torch.float32, shape, self.grid)
        x = Sharded.from_local(x, partition(shape, self.grid), self.grid)
        try:
            with autocast(self.grid.device, self.recipe.precision):
                prediction: Sharded = self.model(x)
        except RecipeError as error:  # of this volume, whatever those of the training were
            raise DataError(f"{where}: {error}") from error
        return prediction
