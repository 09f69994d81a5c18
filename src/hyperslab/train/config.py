"""What a recipe may say: the keys, their types and their defaults."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

Probability = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of a recipe: no unknown keys, no changes, no infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Model(Section):
    """The network. ``width``, the channels and the outputs are those of the data."""

    name: Literal["cosmoflow"] = "cosmoflow"
    variant: Literal["paper2020", "sc18", "lbann", "mlperf"] = "paper2020"
    width: PositiveInt | None = None  # voxels along each side; given, it is checked
    batch_norm: bool = False
    statistics: Literal["grid", "replica"] = "grid"  # of batch norm: over all, or per replica
    dropout: Probability | None = None  # of dropping; None: the variant's own


class Data(Section):
    """The universes and how they are read."""

    path: Path
    batch_size: PositiveInt  # samples over all ranks
    subvolume: PositiveInt | None = None  # cut every cube into cubes of this width
    channels: Literal["first", "last"] | None = None  # None: found out
    transform: Literal["log1p", "mean"] | None = "log1p"
    augment: bool = False  # flips and axis permutations
    fractions: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = (0.8, 0.1, 0.1)
    seed: NonNegativeInt = 0  # of the split and of the order
    prefetch: NonNegativeInt = 2  # mini-batches read ahead

    @field_validator("fractions")
    @classmethod
    def _whole(cls, fractions: tuple[float, float, float]) -> tuple[float, float, float]:
        if not math.isclose(sum(fractions), 1.0, abs_tol=1e-6):
            raise ValueError(f"train, validation and test make {sum(fractions):g}, not 1")
        return fractions


class Places(Section):
    """The grid of ranks."""

    data: PositiveInt = 1
    depth: PositiveInt = 1
    height: PositiveInt = 1
    width: PositiveInt = 1

    @property
    def size(self) -> int:
        """How many ranks it takes."""
        return self.data * self.depth * self.height * self.width


class Linear(Section):
    """From 1 to ``factor`` in ``epochs``, then flat (Oyama et al. 2020, section IV)."""

    name: Literal["linear"] = "linear"
    epochs: PositiveFloat = 100
    factor: Annotated[float, Field(gt=0, le=1)] = 0.01
    warmup: NonNegativeFloat = 0  # [epochs] from 0 to 1, before


class Steps(Section):
    """Constant between epochs: ``at`` maps an epoch to the factor from there on."""

    name: Literal["steps"]
    at: dict[NonNegativeInt, NonNegativeFloat] = {}
    warmup: NonNegativeFloat = 0


class Common(Section):
    """What all optimizers have."""

    learning_rate: PositiveFloat = 1e-3
    schedule: Annotated[Linear | Steps, Field(discriminator="name")] = Linear()
    clip: PositiveFloat | None = None  # the gradient's L2 norm at most
    accumulate: PositiveInt = 1  # mini-batches per step


class Adam(Common):
    """Adam with the paper's defaults."""

    name: Literal["adam"] = "adam"
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class SGD(Common):
    """Stochastic gradient descent."""

    name: Literal["sgd"]
    momentum: Probability = 0.9


class Checkpoints(Section):
    """When one is written and how many stay; the best stays besides."""

    every: PositiveInt = 1  # [epochs]; the last epoch always
    every_steps: PositiveInt | None = None
    keep: PositiveInt = 2


class Recipe(Section):
    """One training run."""

    model: Model = Model()
    data: Data
    grid: Places = Places()
    optimizer: Annotated[Adam | SGD, Field(discriminator="name")] = Adam()
    loss: Literal["mse", "l1"] = "mse"
    epochs: PositiveInt = 130
    precision: Literal["float32", "bf16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: NonNegativeInt = 0  # of the weights and of dropout
    output: Path  # the run's folder
    checkpoint: Checkpoints = Checkpoints()
    timeout: PositiveFloat = 600  # [s] that a rank waits for the others
