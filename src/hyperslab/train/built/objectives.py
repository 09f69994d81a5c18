"""The objective of a recipe: its loss and what is measured, for the data that there are."""

from __future__ import annotations

from typing import get_args

from hyperslab.checkpoint.data_card import DataCard
from hyperslab.errors import RecipeError
from hyperslab.recipe.schema import Recipe, RegressionLoss, SegmentationLoss
from hyperslab.recipe.targets.section import TargetSection
from hyperslab.train.built.networks import of_another_kind
from hyperslab.train.objective import Objective, Regression, Segmentation, WithMetrics, named_loss
from hyperslab.train.parts.given import NOTHING_GIVEN, Given, LossFunction
from hyperslab.train.parts.loss import fitting, loss_from_target


def build_objective(recipe: Recipe, about: DataCard, given: Given = NOTHING_GIVEN) -> Objective:
    """The recipe's loss, and the measures that go with such data.

    Raises:
        RecipeError: the loss is for another kind of data; or of a target what `Maker` raises.
    """
    loss = given.loss or recipe.loss
    if isinstance(loss, str) and loss not in losses_for(about):
        raise RecipeError(of_another_kind(recipe, about))
    if isinstance(loss, TargetSection):
        loss = loss_from_target(loss, about, "loss", recipe.trusted)
    elif not isinstance(loss, str):
        loss = fitting(loss, about, "the loss", trains=True)
    found = Segmentation(loss, about.classes) if about.classes else Regression(loss)
    metrics = build_metrics(recipe, about, given)
    return WithMetrics(found, metrics) if metrics else found


def build_metrics(
    recipe: Recipe, about: DataCard, given: Given = NOTHING_GIVEN
) -> dict[str, LossFunction]:
    """What the recipe measures besides; raises what `build_objective` does."""
    found: dict[str, LossFunction] = {}
    for name, metric in {**recipe.metrics, **given.metrics}.items():
        key = f"metrics.{name}"
        if key in recipe.handed_in and name not in given.metrics:
            continue
        if isinstance(metric, TargetSection):
            found[name] = loss_from_target(metric, about, key, recipe.trusted)
        elif isinstance(metric, str):
            if metric not in losses_for(about):
                there = ", ".join(losses_for(about))
                raise RecipeError(f"{key}={metric} does not go with the data: use one of {there}")
            found[name] = named_loss(metric)
        else:
            found[name] = fitting(metric, about, key, trains=False)
    return found


def losses_for(about: DataCard) -> tuple[str, ...]:
    """The names of losses that go with such data."""
    return get_args(SegmentationLoss if about.classes else RegressionLoss)
