"""Every name that a recipe may use stands for something, and no other does (tier: no process)."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import torch

from hyperslab.checkpoint.run_state import DataCard
from hyperslab.errors import RecipeError
from hyperslab.formats.targets import Parameters
from hyperslab.models.cosmoflow import COSMOFLOW_VARIANTS
from hyperslab.recipe.optimizer import AdamSection, OptimizerSection, StepSchedule
from hyperslab.recipe.schema import CosmoFlowSection, Recipe, RegressionLoss, SegmentationLoss
from hyperslab.train.builders import build_model
from hyperslab.train.network import MODELS
from hyperslab.train.objective import LOSSES, Regression, Segmentation
from hyperslab.train.optimizer import OPTIMIZERS, SCHEDULES, build_optimizer, factor_at
from hyperslab.train.step import PRECISIONS, autocast

WEIGHTS = [torch.nn.Parameter(torch.zeros(1))]


def names_of(alternatives: object) -> set[str]:
    """The names by which a recipe tells the alternatives of a section apart."""
    kinds = [kind for kind in get_args(alternatives) if kind is not type(None)]
    if get_origin(kinds[0]) is Annotated:  # of what may also be null
        return names_of(get_args(kinds[0])[0])
    return {name for kind in kinds for name in get_args(kind.model_fields["name"].annotation)}


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (OPTIMIZERS, names_of(Recipe.model_fields["optimizer"].annotation)),
        ({*SCHEDULES, "target"}, names_of(OptimizerSection.model_fields["schedule"].annotation)),
        (MODELS, names_of(Recipe.model_fields["model"].annotation)),
        (COSMOFLOW_VARIANTS, get_args(CosmoFlowSection.model_fields["variant"].annotation)),
        (LOSSES, {*get_args(RegressionLoss), *get_args(SegmentationLoss)}),
        (PRECISIONS, get_args(Recipe.model_fields["precision"].annotation)),
    ],
    ids=["optimizers", "schedules", "models", "variants", "losses", "precisions"],
)
def test_the_names_of_the_schema_are_those_of_the_table(
    table: Collection[str], names: Collection[str]
) -> None:
    assert len(names) > 1
    assert set(table) == set(names)


def unknown(section: Any) -> Any:
    """A section as a schema would have it that knows a name more than the tables."""
    return section.model_copy(update={"name": "lion"})


def test_an_unknown_name_is_not_taken_for_another() -> None:
    with pytest.raises(RecipeError, match=r"'lion' for 'optimizer\.name': use one of adam, sgd"):
        build_optimizer(unknown(AdamSection()), WEIGHTS)
    with pytest.raises(RecipeError, match=r"'optimizer\.schedule\.name': use one of linear"):
        factor_at(unknown(StepSchedule(name="steps")), 0.5)
    with pytest.raises(RecipeError, match="'precision': use one of float32, bf16"):
        autocast(torch.device("cpu"), "lion")
    with pytest.raises(RecipeError, match="'loss': use one of mse"):
        Regression("lion")
    with pytest.raises(RecipeError, match="'loss': use one of mse"):
        Segmentation("lion", ("a", "b"))


def test_an_unknown_network_is_not_taken_for_another() -> None:
    recipe = Recipe(data={"path": Path("x"), "batch_size": 1}, output=Path("out"))
    recipe = recipe.model_copy(update={"model": unknown(recipe.model)})
    card = DataCard((1, 16, 16, 16), (1, 16, 16, 16), (), Parameters.normalised(("a",)))
    with pytest.raises(RecipeError, match=r"'model\.name': use one of cosmoflow, unet3d"):
        build_model(recipe, card, None)  # type: ignore[arg-type]


def test_a_step_schedule_starts_at_the_whole_rate() -> None:
    schedule = StepSchedule(name="steps", at={2: 0.5, 4: 0.25})
    rates = [factor_at(schedule, epoch) for epoch in (0, 1.9, 2, 3.9, math.inf)]
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]
