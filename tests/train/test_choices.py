"""Names of tables stand for something in a recipe, and no others do (tier: no process)."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import get_args

import pytest
import torch

from hyperslab.errors import RecipeError
from hyperslab.models.cosmoflow import COSMOFLOW_VARIANTS
from hyperslab.models.widths import COSMOFLOW_WIDTHS
from hyperslab.recipe.network import CosmoFlowSection
from hyperslab.recipe.schedule import StepSchedule
from hyperslab.recipe.schema import Recipe, RegressionLoss, SegmentationLoss
from hyperslab.train.objective import LOSSES, Objective
from hyperslab.train.step import PRECISIONS, autocast


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (COSMOFLOW_VARIANTS, get_args(CosmoFlowSection.model_fields["variant"].annotation)),
        (COSMOFLOW_WIDTHS, COSMOFLOW_VARIANTS),
        (LOSSES, {*get_args(RegressionLoss), *get_args(SegmentationLoss)}),
        (PRECISIONS, get_args(Recipe.model_fields["precision"].annotation)),
    ],
    ids=["variants", "widths", "losses", "precisions"],
)
def test_the_names_of_the_schema_are_those_of_the_table(
    table: Collection[str], names: Collection[str]
) -> None:
    assert len(names) > 1
    assert set(table) == set(names)


def test_an_unknown_name_is_not_taken_for_another() -> None:
    words = "'precision': use one of float32, tf32, bf16, float16"
    with pytest.raises(RecipeError, match=words), autocast(torch.device("cpu"), "lion"):
        pass
    with pytest.raises(RecipeError, match="'loss': use one of mse"):
        Objective("lion")
    with pytest.raises(RecipeError, match="'loss': use one of mse"):
        Objective("lion", ("a", "b"))


def test_a_step_schedule_starts_at_the_whole_rate() -> None:
    schedule = StepSchedule(name="steps", at={2: 0.5, 4: 0.25})
    rates = [schedule.factor_at(epoch) for epoch in (0, 1.9, 2, 3.9, math.inf)]
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]
