"""Declares the sections of a recipe on the optimizer, its learning rate, and when training ends.

`MlperfSection` is what MLPerf's log says of a submission; MLPerf asks for a goal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from hyperslab.recipe.section import Section, TargetSection

Probability = Annotated[float, Field(ge=0, lt=1)]


class LinearSchedule(Section):
    """Goes from 1 to ``factor`` in ``epochs``, then flat (Oyama et al. 2020, section IV)."""

    name: Literal["linear"] = "linear"
    epochs: PositiveFloat = 100  # until the rate is at its least
    factor: Annotated[float, Field(gt=0, le=1)] = 0.01  # the least rate over the first
    warmup: NonNegativeFloat = 0  # [epochs] from 0 to 1, before


class PolynomialSchedule(Section):
    """Goes from 1 to ``factor`` in ``epochs``, then flat (Mathuriya et al. 2018, section III-B)."""

    name: Literal["polynomial"]
    epochs: PositiveFloat = 100  # until the rate is at its least
    factor: Annotated[float, Field(gt=0, le=1)] = 0.05  # the least rate over the first
    power: PositiveFloat = 1  # of what is left of the epochs
    warmup: NonNegativeFloat = 0  # [epochs] from 0 to 1, before


class StepSchedule(Section):
    """Constant between epochs: ``at`` maps how many epochs are done to the factor from there on."""

    name: Literal["steps"]
    at: dict[NonNegativeInt, NonNegativeFloat] = Field(default={})  # epoch: factor
    warmup: NonNegativeFloat = 0  # [epochs] from 0 to 1, before


class TargetSchedule(TargetSection):
    """A class derived from torch's `LRScheduler`; it moves on after each epoch or each step."""

    name: Literal["target"] = "target"
    every: Literal["epoch", "step"] | None = None  # None: the class's habit


AnySchedule = Annotated[
    LinearSchedule | PolynomialSchedule | StepSchedule | TargetSchedule,
    Field(discriminator="name"),
]


class LarcSection(Section):
    """Layer-wise adaptive rate control, see `hyperslab.models.larc` (Mathuriya et al. 2018)."""

    trust: PositiveFloat = 0.002  # of the weights' norm over the gradient's; at most 1 is taken
    otherwise: PositiveFloat = 6.25e-5  # where one of the norms is 0


class OptimizerSection(Section):
    """Holds what all optimizers have."""

    learning_rate: PositiveFloat = 1e-3  # before the schedule's factor
    schedule: AnySchedule | None = LinearSchedule()  # null: the rate stays
    clip: PositiveFloat | None = None  # the gradient's L2 norm at most
    larc: LarcSection | None = None  # after clipping; {} takes the paper's numbers
    accumulate: PositiveInt = 1  # mini-batches per step


class AdamSection(OptimizerSection):
    """Configures Adam; the defaults are the paper's."""

    name: Literal["adam"] = "adam"
    betas: tuple[Probability, Probability] = (0.9, 0.999)  # of the running means of g and g²
    eps: PositiveFloat = 1e-8  # added to the root of the mean of g²


class SGDSection(OptimizerSection):
    """Configures stochastic gradient descent."""

    name: Literal["sgd"]
    momentum: Probability = 0.9  # what stays of the last step


class TargetOptimizer(TargetSection, OptimizerSection):
    """A class derived from `torch.optim.Optimizer`; without a schedule its rate stays."""

    name: Literal["target"] = "target"
    learning_rate: PositiveFloat | None = None  # type: ignore[assignment]  # None: the class's own
    schedule: AnySchedule | None = None  # null: the rate stays

    @model_validator(mode="before")
    @classmethod
    def _as_torch_names_it(cls, values: Any) -> Any:
        """``lr`` is the learning rate, as torch calls it."""
        if not isinstance(values, dict) or "lr" not in values or "learning_rate" in values:
            return values
        return {("learning_rate" if key == "lr" else key): v for key, v in values.items()}


AnyOptimizer = Annotated[AdamSection | SGDSection | TargetOptimizer, Field(discriminator="name")]


class StopSection(Section):
    """Training ends after the first epoch whose validation has no more than all that is given."""

    validation_loss: PositiveFloat | None = None  # at most
    validation_mae: PositiveFloat | None = None  # at most, of networks that predict numbers

    @model_validator(mode="after")
    def _something(self) -> StopSection:
        if not self.wanted:
            raise ValueError("stop_at needs validation_loss or validation_mae")
        return self

    @property
    def wanted(self) -> dict[str, float]:
        """Return the most that each measure may be."""
        return {name: value for name, value in self.model_dump().items() if value is not None}

    def reached(self, measured: Mapping[str, float | None]) -> bool:
        """Say whether a validation is as good as that."""
        found = [(measured.get(name), most) for name, most in self.wanted.items()]
        return all(value is not None and value <= most for value, most in found)


class MlperfSection(Section):
    """Describes a submission in MLPerf's log, which this section asks for, see `MlperfLog`."""

    org: Annotated[str, Field(min_length=1)]  # who submits
    platform: Annotated[str, Field(min_length=1)]  # the name of the machine
    division: Literal["closed", "open"] = "open"  # of MLPerf's rules
    status: Literal["cloud", "onprem", "preview", "research"] = "research"  # of the machine
