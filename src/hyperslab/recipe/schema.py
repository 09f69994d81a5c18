"""What a recipe may say: the keys, their types and their defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    ByteSize,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from hyperslab.errors import DataError
from hyperslab.formats import registry
from hyperslab.formats.plugins import load_plugins
from hyperslab.formats.source import Source
from hyperslab.recipe.section import Section
from hyperslab.recipe.synthetic import SyntheticSection

Probability = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Marks a key that takes one of a list of words that may grow; for errors."""

    words: Callable[[], Sequence[str]]


def _registered(format: str) -> str:
    if format not in registry.names():
        raise ValueError("it is no registered format")
    return format


FormatName = Annotated[str, AfterValidator(_registered), OneOf(registry.names)]


class ModelSection(Section):
    """What all networks have. Their channels, outputs and classes are those of the data."""

    segments: ClassVar[bool] = False  # a class for every voxel, or numbers for the volume
    statistics: Literal["grid", "replica"] = "grid"  # of batch norm: over all, or per replica


class CosmoFlowSection(ModelSection):
    """From volumes to numbers."""

    name: Literal["cosmoflow"] = "cosmoflow"
    variant: Literal["paper2020", "sc18", "lbann", "mlperf"] = "paper2020"
    width: PositiveInt | None = None  # voxels along each side; given, it is checked
    batch_norm: bool = False
    dropout: Probability | None = None  # of dropping; None: the variant's own


class UNet3DSection(ModelSection):
    """From volumes to a class for every voxel."""

    segments: ClassVar[bool] = True
    name: Literal["unet3d"]
    channels: PositiveInt = 32  # after the first convolution
    levels: PositiveInt = 3  # poolings


AnyModel = Annotated[CosmoFlowSection | UNet3DSection, Field(discriminator="name")]


class DataSection(Section):
    """The volumes and how they are read."""

    path: Path | None = None  # a folder; or
    synthetic: SyntheticSection | None = None  # made in memory, in place of files
    batch_size: PositiveInt  # samples over all ranks
    subvolume: PositiveInt | None = None  # cut every cube into cubes of this width
    plugins: tuple[str, ...] = ()  # modules to import, which register formats
    format: FormatName | None = None  # None: found out
    channels: Literal["first", "last"] | None = None  # None: found out
    transform: Literal["auto", "log1p", "mean"] | None = "auto"  # log1p of counts, none of scans
    window: tuple[float, float] | None = None  # [HU], becomes [0, 1]; takes the transform's place
    augment: bool = False  # flips, and axis permutations where voxels have no classes
    fractions: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = (0.8, 0.1, 0.1)
    seed: NonNegativeInt = 0  # of the split and of the order
    driver: Literal["mpio"] | None = None  # read HDF5 together, by MPI-IO
    mode: Literal["direct", "store", "preload"] = "store"  # whether boxes are kept, see `open`
    budget: ByteSize | None = None  # of a rank's store, "8GiB" say; None: half of what is free
    staging: Path | None = None  # a folder of the node for what does not fit into the budget
    on_error: Literal["stop", "skip"] = "stop"  # where a sample cannot be read
    prefetch: NonNegativeInt = 2  # mini-batches read ahead
    prefetch_bytes: ByteSize = ByteSize(1 << 30)  # that a rank may hold of them

    @field_validator("plugins")
    @classmethod
    def _import(cls, plugins: tuple[str, ...]) -> tuple[str, ...]:
        """Before the format is looked at, which may be theirs."""
        try:
            load_plugins(plugins)
        except DataError as error:
            raise ValueError(str(error)) from error
        return plugins

    @field_validator("fractions")
    @classmethod
    def _whole(cls, fractions: tuple[float, float, float]) -> tuple[float, float, float]:
        if not math.isclose(sum(fractions), 1.0, abs_tol=1e-6):
            raise ValueError(f"train, validation and test make {sum(fractions):g}, not 1")
        return fractions

    @model_validator(mode="after")
    def _one_transform(self) -> DataSection:
        if self.window is not None and self.transform not in ("auto", None):
            raise ValueError("data.window and data.transform are two transforms; give one of them")
        return self

    @model_validator(mode="after")
    def _of_the_store(self) -> DataSection:
        if self.mode == "direct" and (self.budget is not None or self.staging is not None):
            raise ValueError("data.budget and data.staging are of the store, but data.mode=direct")
        return self

    @model_validator(mode="after")
    def _one_origin(self) -> DataSection:
        if (self.path is None) == (self.synthetic is None):
            found = "neither is given" if self.path is None else "both are; make one of them null"
            raise ValueError(
                "data.path (a folder of volumes) or data.synthetic (volumes made in memory) is "
                f"needed, and {found}"
            )
        of_files = [key for key in ("format", "channels", "driver") if getattr(self, key)]
        if self.synthetic is not None and of_files:
            raise ValueError(f"data.{of_files[0]} is of files, but data.synthetic reads none")
        return self

    @property
    def origin(self) -> Path | Source:
        """The folder, or the source of synthetic volumes: what `hyperslab.open` takes."""
        if self.synthetic is not None:
            return self.synthetic.source()
        assert self.path is not None
        return self.path

    @property
    def where(self) -> str:
        """The words by which an error names the volumes."""
        return "data.synthetic" if self.path is None else f"data.path {self.path}"


class GridSection(Section):
    """The grid of ranks: its axes, or ``grid: auto`` for the best one of so many ranks."""

    data: PositiveInt = 1  # replicas, over which a mini-batch is cut
    depth: PositiveInt = 1  # ranks along the depth of every sample
    height: PositiveInt = 1
    width: PositiveInt = 1
    auto: bool = Field(
        default=False, exclude=True
    )  # the plan chooses the axes; never in a run's recipe

    @model_validator(mode="before")
    @classmethod
    def _short(cls, values: object) -> object:
        """``grid: auto`` for ``grid: {auto: true}``."""
        return {"auto": True} if values == "auto" else values

    @model_validator(mode="after")
    def _auto_or_axes(self) -> GridSection:
        if self.auto and self.size > 1:
            raise ValueError("grid=auto chooses the axes itself: give no grid.depth or the like")
        return self

    @property
    def size(self) -> int:
        """How many ranks it takes."""
        return self.data * self.depth * self.height * self.width


class LinearSchedule(Section):
    """From 1 to ``factor`` in ``epochs``, then flat (Oyama et al. 2020, section IV)."""

    name: Literal["linear"] = "linear"
    epochs: PositiveFloat = 100
    factor: Annotated[float, Field(gt=0, le=1)] = 0.01
    warmup: NonNegativeFloat = 0  # [epochs] from 0 to 1, before


class StepSchedule(Section):
    """Constant between epochs: ``at`` maps an epoch to the factor from there on."""

    name: Literal["steps"]
    at: dict[NonNegativeInt, NonNegativeFloat] = Field(default={})
    warmup: NonNegativeFloat = 0


AnySchedule = Annotated[LinearSchedule | StepSchedule, Field(discriminator="name")]


class OptimizerSection(Section):
    """What all optimizers have."""

    learning_rate: PositiveFloat = 1e-3
    schedule: AnySchedule = LinearSchedule()
    clip: PositiveFloat | None = None  # the gradient's L2 norm at most
    accumulate: PositiveInt = 1  # mini-batches per step


class AdamSection(OptimizerSection):
    """Adam with the paper's defaults."""

    name: Literal["adam"] = "adam"
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class SGDSection(OptimizerSection):
    """Stochastic gradient descent."""

    name: Literal["sgd"]
    momentum: Probability = 0.9


AnyOptimizer = Annotated[AdamSection | SGDSection, Field(discriminator="name")]


class CheckpointSection(Section):
    """When one is written and how many stay; the best stays besides."""

    every: PositiveInt = 1  # [epochs]; the last epoch always
    every_steps: PositiveInt | None = None
    keep: PositiveInt = 2


RegressionLoss = Literal["mse", "l1"]
SegmentationLoss = Literal[
    "cross_entropy", "dice", "generalised_dice", "focal", "dice_cross_entropy"
]


class Recipe(Section):
    """One training run."""

    model: AnyModel = CosmoFlowSection()
    data: DataSection
    grid: GridSection = GridSection()
    optimizer: AnyOptimizer = AdamSection()
    loss: Literal[RegressionLoss, SegmentationLoss] = "mse"
    epochs: PositiveInt = 130
    precision: Literal["float32", "bf16"] = "float32"
    # of convolutions on the CPU: the fastest here, by a fixed rule (bit-equal anywhere), or torch's
    kernels: Literal["measure", "fixed", "torch"] = "measure"
    memory: Literal["keep", "recompute"] = "keep"  # activations, until the backward pass
    # cuda: one rank per device, over NCCL; cuda-shared: several may have one, over gloo, to test
    device: Literal["auto", "cpu", "cuda", "cuda-shared"] = "auto"
    seed: NonNegativeInt = 0  # of the weights and of dropout
    output: Path  # the run's folder
    checkpoint: CheckpointSection = CheckpointSection()
    timeout: PositiveFloat = 600  # [s] that a rank waits for the others
    peak: PositiveFloat | None = None  # [flop/s] of a rank's device; --profile measures it

    @model_validator(mode="after")
    def _loss_of_the_network(self) -> Recipe:
        losses = get_args(SegmentationLoss if self.model.segments else RegressionLoss)
        if self.loss not in losses:
            raise ValueError(
                f"loss={self.loss} does not go with model.name={self.model.name}: "
                f"use one of {', '.join(losses)}"
            )
        return self
