"""What a recipe may say: the keys, their types and their defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hyperslab.recipe.data import DataSection
from hyperslab.recipe.goal import MlperfSection, StopSection
from hyperslab.recipe.optimizer import (
    AdamSection,
    AnyOptimizer,
    LinearSchedule,
    OptimizerSection,
    Probability,
    SGDSection,
    StepSchedule,
)
from hyperslab.recipe.section import Section

__all__ = [
    "AdamSection",
    "CosmoFlowSection",
    "DataSection",
    "GridSection",
    "LinearSchedule",
    "MlperfSection",
    "OptimizerSection",
    "Recipe",
    "RegressionLoss",
    "SGDSection",
    "SegmentationLoss",
    "StepSchedule",
    "UNet3DSection",
]


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


class CheckpointSection(Section):
    """When one is written and how many stay; the best stays besides."""

    every: PositiveInt = 1  # [epochs]; the last epoch always
    every_steps: PositiveInt | None = None
    keep: PositiveInt = 2
    background: bool = False  # write while the steps go on, from a copy in host memory
    # of checkpoints of earlier versions, which hold pickles: reading one runs what code is in it;
    # an override only, for a run's recipe comes from where its checkpoints come from
    trust_pickle: bool = Field(default=False, exclude=True)


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
    stop_at: StopSection | None = None  # before, where the validation is as good as this
    mlperf: MlperfSection | None = None  # write MLPerf's log
    precision: Literal["float32", "bf16"] = "float32"
    # of convolutions on the CPU: the fastest here, by a fixed rule (bit-equal anywhere), or torch's
    kernels: Literal["measure", "fixed", "torch"] = "measure"
    memory: Literal["keep", "recompute"] = "keep"  # activations, until the backward pass
    # cuda: one rank per device, over NCCL; cuda-shared: several may have one, over gloo, to test
    device: Literal["auto", "cpu", "cuda", "cuda-shared"] = "auto"
    seed: NonNegativeInt = 0  # of the weights and of dropout
    output: Path  # the run's folder
    checkpoint: CheckpointSection = CheckpointSection()
    follow_test: bool = False  # the test loss by epoch, to be shown; nothing is chosen by it
    timeout: PositiveFloat = 600  # [s] that a rank waits for the others
    peak: PositiveFloat | None = None  # [flop/s] of a rank's device; --profile measures it

    @model_validator(mode="after")
    def _goal_of_the_network(self) -> Recipe:
        if self.model.segments and self.stop_at is not None and self.stop_at.validation_mae:
            raise ValueError(
                f"stop_at.validation_mae does not go with model.name={self.model.name}, which "
                "predicts no numbers: use stop_at.validation_loss"
            )
        if self.model.segments and self.mlperf is not None:
            raise ValueError(f"mlperf does not go with model.name={self.model.name}")
        return self

    @model_validator(mode="after")
    def _loss_of_the_network(self) -> Recipe:
        losses = get_args(SegmentationLoss if self.model.segments else RegressionLoss)
        if self.loss not in losses:
            raise ValueError(
                f"loss={self.loss} does not go with model.name={self.model.name}: "
                f"use one of {', '.join(losses)}"
            )
        return self
