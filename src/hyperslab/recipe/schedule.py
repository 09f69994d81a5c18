"""Declares the learning-rate schedules that a recipe may name, each with what it does.

A schedule is one class derived from `RateFunction`, here or in a module of its own that
`hyperslab.recipe.optimizer` imports: the recipe's names are those of the classes. Torch's own are
named by target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from hyperslab.errors import RecipeError
from hyperslab.recipe.instantiate import A_SCHEDULE, Maker, imported
from hyperslab.recipe.section import NamedSection, TargetSection

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

Every = Literal["step", "epoch"]  # a scheduler moves on after each of these

SCHEDULES_BY_STEP = ("OneCycleLR", "CyclicLR")  # torch's that move on after every step

SCHEDULES_OF_FUNCTIONS = ("LambdaLR", "MultiplicativeLR")

KEY = "optimizer.schedule"


class ScheduleSection(NamedSection):
    """Holds what all schedules do."""

    def build(
        self, optimizer: Optimizer, *, epochs: int, steps_per_epoch: int
    ) -> tuple[LRScheduler, Every]:
        """Make torch's scheduler for a training of such length, and say when it moves on."""
        raise NotImplementedError


class RateFunction(ScheduleSection):
    """Makes the learning rate a function of the epochs done, set before every step."""

    def factor_at(self, epoch: float) -> float:
        """Return the factor of the learning rate after so many epochs, which need not be whole."""
        raise NotImplementedError

    def build(
        self, optimizer: Optimizer, *, epochs: int, steps_per_epoch: int
    ) -> tuple[LRScheduler, Every]:
        from torch.optim.lr_scheduler import LambdaLR

        return LambdaLR(optimizer, lambda step: self.factor_at(step / steps_per_epoch)), "step"


def warm_up(epoch: float, epochs: float) -> float:
    """Return the share of a schedule's rate that a linear warm-up from zero has reached."""
    return min(epoch / epochs, 1.0) if epochs else 1.0


class LinearSchedule(RateFunction):
    """Goes from 1 to ``factor`` in ``epochs``, then flat (Oyama et al. 2020, section IV)."""

    name: Literal["linear"] = "linear"
    epochs: PositiveFloat = 100  # until the rate is at its least
    factor: Annotated[float, Field(gt=0, le=1)] = 0.01  # the least rate over the first
    warmup: NonNegativeFloat = 0  # [epochs] from 0 to 1, before

    def factor_at(self, epoch: float) -> float:
        """Return 1 - (1 - factor) * min(epoch / epochs, 1) (Oyama et al. 2020, section IV)."""
        decayed = 1 - (1 - self.factor) * min(epoch / self.epochs, 1.0)
        return warm_up(epoch, self.warmup) * decayed


class PolynomialSchedule(RateFunction):
    """Goes from 1 to ``factor`` in ``epochs``, then flat (Mathuriya et al. 2018, section III-B)."""

    name: Literal["polynomial"]
    epochs: PositiveFloat = 100  # until the rate is at its least
    factor: Annotated[float, Field(gt=0, le=1)] = 0.05  # the least rate over the first
    power: PositiveFloat = 1  # of what is left of the epochs
    warmup: NonNegativeFloat = 0  # [epochs] from 0 to 1, before

    def factor_at(self, epoch: float) -> float:
        """Return (1 - factor) (1 - min(epoch / epochs, 1))^power + factor.

        Times the learning rate η_0, with power 1, that is (η_0 - η_min)(1 - t / t_decay) + η_min
        (Mathuriya et al. 2018, section III-B), as ``factor`` is η_min / η_0.
        """
        left = 1 - min(epoch / self.epochs, 1.0)
        decayed = float((1 - self.factor) * left**self.power + self.factor)
        return warm_up(epoch, self.warmup) * decayed


class StepSchedule(RateFunction):
    """Constant between epochs: ``at`` maps how many epochs are done to the factor from there on."""

    name: Literal["steps"]
    at: dict[NonNegativeInt, NonNegativeFloat] = Field(default={})  # epoch: factor
    warmup: NonNegativeFloat = 0  # [epochs] from 0 to 1, before

    def factor_at(self, epoch: float) -> float:
        """Return the factor of the latest epoch that is reached, 1 before the first."""
        reached = [start for start in self.at if start <= epoch]
        return warm_up(epoch, self.warmup) * (self.at[max(reached)] if reached else 1.0)


class TargetSchedule(TargetSection, ScheduleSection):
    """A class derived from torch's `LRScheduler`; it moves on after each epoch or each step."""

    name: Literal["target"] = "target"
    every: Every | None = None  # None: the class's habit

    def check(self) -> None:
        Maker(KEY, A_SCHEDULE, (None,)).check(self)

    def build(
        self, optimizer: Optimizer, *, epochs: int, steps_per_epoch: int
    ) -> tuple[LRScheduler, Every]:
        """Make the scheduler that is named; refuse one that takes a function (`RecipeError`)."""
        name = getattr(imported(str(self.target), f"{KEY}.target", self.trust), "__name__", "")
        if name in SCHEDULES_OF_FUNCTIONS:
            raise RecipeError(
                f"{KEY}.target {self.target} takes a function, which a recipe cannot hold\n"
                "    name a class of your own derived from LRScheduler, or hand one to "
                "hyperslab.fit"
            )
        every: Every = self.every or ("step" if name in SCHEDULES_BY_STEP else "epoch")
        total = epochs * steps_per_epoch
        references = {
            "training.epochs": epochs,
            "training.steps": total,
            "training.steps_per_epoch": steps_per_epoch,
        }
        section = self
        if name == "OneCycleLR" and not {"total_steps", "epochs"} & self.arguments.keys():
            length: dict[str, Any] = {"total_steps": total if every == "step" else epochs}
            section = self.model_copy(update={"arguments": {**self.arguments, **length}})
        return Maker(KEY, A_SCHEDULE, (optimizer,), references)(section), every
