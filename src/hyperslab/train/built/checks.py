"""What a recipe names, looked at before anything is opened or made."""

from __future__ import annotations

from hyperslab.errors import RecipeError
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.targets.section import TargetSection
from hyperslab.train.optimizers import check_optimizer
from hyperslab.train.parts.given import Given
from hyperslab.train.parts.loss import check_loss
from hyperslab.train.parts.networks import check_target, name_of
from hyperslab.train.parts.schedules import check_schedule


def check_targets(recipe: Recipe) -> None:
    """Find what the recipe names, and look at its arguments, before anything is opened or made.

    Raises:
        RecipeError: one cannot be found, is of another kind, or does not take such arguments.
    """
    check_target(recipe)
    if "optimizer" not in recipe.handed_in:
        check_optimizer(recipe.optimizer)
    if "optimizer.schedule" not in recipe.handed_in:
        check_schedule(recipe)
    metrics = {f"metrics.{name}": metric for name, metric in recipe.metrics.items()}
    for key, section in {"loss": recipe.loss, **metrics}.items():
        if isinstance(section, TargetSection) and key not in recipe.handed_in:
            check_loss(section, key, recipe.trusted)


def check_given(recipe: Recipe, given: Given) -> None:
    """Refuse to train without what a program has handed in when the run began.

    Raises:
        RecipeError: names it.
    """
    here = {
        "loss": given.loss,
        "optimizer": given.optimizer,
        "optimizer.schedule": given.schedule,
        **{f"metrics.{name}": metric for name, metric in given.metrics.items()},
    }
    missing = [f"{key} ({recipe.handed_in[key]})" for key in recipe.handed_in if not here.get(key)]
    if recipe.model.name == "python" and given.model is None:
        missing.insert(0, name_of(recipe))
    if missing:
        raise RecipeError(
            f"this run is a program's, which has handed in {', '.join(missing)}\n"
            f"    go on by the program: hs.fit(..., output={str(recipe.output)!r}, resume=True)"
        )
