"""Declares the optimizers that a recipe may name, each with how it is made; and when training ends.

An optimizer is one class derived from `OptimizerSection`, here or in a module of its own that
`hyperslab.recipe.schema` imports: the recipe's names are those of the classes. Torch's own are
named by target. `MlperfSection` is what MLPerf's log says of a submission; MLPerf asks for a goal.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, FiniteFloat, PositiveFloat, PositiveInt, model_validator

from hyperslab.errors import RecipeError
from hyperslab.recipe.instantiate import AN_OPTIMIZER, Maker, imported
from hyperslab.recipe.schedule import LinearSchedule, ScheduleSection
from hyperslab.recipe.section import NamedSection, Section, TargetSection, declared

Probability = Annotated[float, Field(ge=0, lt=1)]

if TYPE_CHECKING:  # a type checker cannot know which classes are declared
    import torch

    AnySchedule = ScheduleSection
else:
    AnySchedule = declared(ScheduleSection)


Weights = Iterable["torch.nn.Parameter"]


class LarcSection(Section):
    """Layer-wise adaptive rate control, see `hyperslab.models.larc` (Mathuriya et al. 2018)."""

    trust: PositiveFloat = 0.002  # times the weights' norm over the gradient's, at most 1
    otherwise: PositiveFloat = 6.25e-5  # where one of the norms is 0


class OptimizerSection(NamedSection):
    """Holds what all optimizers have."""

    learning_rate: PositiveFloat = 1e-3  # before the schedule's factor
    schedule: AnySchedule | None = LinearSchedule()  # null: the rate stays
    clip: PositiveFloat | None = None  # the largest L2 norm of the gradient
    larc: LarcSection | None = None  # after clipping; {} takes the paper's numbers
    accumulate: PositiveInt = 1  # mini-batches per step

    def build(self, weights: Weights) -> torch.optim.Optimizer:
        """Make torch's optimizer of these weights with the section's numbers."""
        raise NotImplementedError


_WAYS = {"fused", "foreach", "capturable", "differentiable"}
"""Names arguments of torch's optimizers that choose how a step is computed."""


def fused_update(kind: Any, weights: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
    """Return the argument by which one kernel updates all weights, where torch has one.

    Its default is a dozen kernels, each of which reads and writes all of them.
    """
    import torch

    has_one = kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    fits = all((w.is_cuda or w.is_cpu) and w.is_floating_point() for w in weights)
    return {"fused": True} if has_one and fits and weights else {}


class AdamSection(OptimizerSection):
    """Configures Adam; the defaults are the paper's."""

    name: Literal["adam"] = "adam"
    betas: tuple[Probability, Probability] = (0.9, 0.999)  # of the running means of g and g²
    eps: PositiveFloat = 1e-8  # added to the root of the mean of g²

    def build(self, weights: Weights) -> torch.optim.Optimizer:
        import torch

        given = [*weights]
        numbers: dict[str, Any] = {"lr": self.learning_rate, "betas": self.betas, "eps": self.eps}
        return torch.optim.Adam(given, **numbers, **fused_update(torch.optim.Adam, given))


class SGDSection(OptimizerSection):
    """Configures stochastic gradient descent."""

    name: Literal["sgd"]
    momentum: Probability = 0.9  # the share of the last step that stays

    def build(self, weights: Weights) -> torch.optim.Optimizer:
        import torch

        given = [*weights]
        numbers: dict[str, Any] = {"lr": self.learning_rate, "momentum": self.momentum}
        return torch.optim.SGD(given, **numbers, **fused_update(torch.optim.SGD, given))


class TargetOptimizer(TargetSection, OptimizerSection):
    """A class derived from `torch.optim.Optimizer`; without a schedule its rate stays."""

    name: Literal["target"] = "target"
    learning_rate: PositiveFloat | None = None  # type: ignore[assignment]  # None: the class's own
    schedule: AnySchedule | None = None  # null: the rate stays

    @model_validator(mode="before")
    @classmethod
    def _as_torch_names_it(cls, values: Any) -> Any:
        """Take ``lr`` for the learning rate, as torch calls it, also among the arguments.

        Else a rate that is set later, by a sweep say, would not be the one that counts.
        """
        if not isinstance(values, dict):
            return values
        arguments = values.get("arguments")
        inner = arguments.get("lr") if isinstance(arguments, dict) else None
        if not (isinstance(rate := _number(inner), float) and rate > 0):
            inner = None  # an object that takes the place of a number
        given = (values.get("lr"), inner, values.get("learning_rate"))
        rates = [rate for rate in given if rate is not None]
        if not rates:
            return values
        if any(_number(rate) != _number(rates[0]) for rate in rates):
            raise ValueError(
                "optimizer.lr and optimizer.learning_rate are the same number, and are given as "
                f"{' and '.join(map(str, rates))}: leave one out, or give optimizer.lr=... on the "
                "command line"
            )
        rest = {key: value for key, value in values.items() if key != "lr"}
        if isinstance(arguments, dict) and inner is not None:
            rest["arguments"] = {key: value for key, value in arguments.items() if key != "lr"}
        return {**rest, "learning_rate": rates[0]}

    def check(self) -> None:
        """Look at the target and its arguments, and make nothing."""
        Maker("optimizer", AN_OPTIMIZER, ([],)).check(self._with_rate())
        kind = imported(str(self.target), "optimizer.target", self.trust)
        check_optimizer_class(kind, f"optimizer.target {self.target}")

    def build(self, weights: Weights) -> torch.optim.Optimizer:
        self.check()
        given = [*weights]
        kind = imported(str(self.target), "optimizer.target", self.trust)
        section = self._with_rate()
        if not _WAYS & section.arguments.keys():
            more = fused_update(kind, given)
            section = section.model_copy(update={"arguments": {**section.arguments, **more}})
        made: torch.optim.Optimizer = Maker("optimizer", AN_OPTIMIZER, (given,))(section)
        return made

    def _with_rate(self) -> TargetOptimizer:
        if self.learning_rate is None:
            return self
        return self.model_copy(update={"arguments": {**self.arguments, "lr": self.learning_rate}})


def _number(value: Any) -> Any:
    """Return a number, also of a text: YAML takes 1e-3 for one."""
    with suppress(TypeError, ValueError):
        return float(value)
    return value


def check_optimizer_class(kind: Any, name: str) -> None:
    """Refuse an optimizer that needs a closure or sparse gradients (`RecipeError`)."""
    step = inspect.signature(kind.step).parameters if hasattr(kind, "step") else {}
    if "closure" in step and step["closure"].default is inspect.Parameter.empty:
        raise RecipeError(
            f"{name} calls the network several times a step (it needs a "
            "closure)\n    take one that makes one step of one gradient: AdamW, SGD, ..."
        )
    import torch

    if kind is torch.optim.SparseAdam:
        raise RecipeError(
            f"{name} takes sparse gradients only, which volumes do not give\n"
            "    take torch.optim.Adam"
        )


class StopSection(Section):
    """Training ends after the first epoch whose validation has no more than all that is given."""

    validation_loss: FiniteFloat | None = None  # at most; that of gaussian may be negative
    validation_mae: PositiveFloat | None = None  # at most, of networks that predict numbers

    def contradictions(self) -> Iterator[str]:
        if not self.wanted:
            yield "stop_at needs validation_loss or validation_mae"

    @property
    def wanted(self) -> dict[str, float]:
        """Return the most that each measure may be."""
        return {name: value for name, value in self.model_dump().items() if value is not None}

    def reached(self, measured: Mapping[str, float | None]) -> bool:
        found = [(measured.get(name), most) for name, most in self.wanted.items()]
        return all(value is not None and value <= most for value, most in found)


class MlperfSection(Section):
    """Describes a submission in MLPerf's log, which this section asks for, see `MlperfLog`."""

    org: Annotated[str, Field(min_length=1)]  # who submits
    platform: Annotated[str, Field(min_length=1)]  # the name of the machine
    division: Literal["closed", "open"] = "open"  # of MLPerf's rules
    status: Literal["cloud", "onprem", "preview", "research"] = "research"  # of the machine
