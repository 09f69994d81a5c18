"""Declares the keys of a recipe, their types and their defaults."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    Tag,
    field_validator,
    model_validator,
)

from hyperslab.errors import DataError, LayoutError
from hyperslab.recipe.data import DataSection, Words
from hyperslab.recipe.instantiate import check_exists
from hyperslab.recipe.network import CosmoFlowSection, NetworkSection
from hyperslab.recipe.optimizer import AdamSection, MlperfSection, OptimizerSection, StopSection
from hyperslab.recipe.section import CodeSection, Section, Seed, TargetSection, UserPath, declared

if TYPE_CHECKING:  # a type checker cannot know which classes are declared
    AnyModel = NetworkSection
    AnyOptimizer = OptimizerSection
else:
    AnyModel = declared(NetworkSection)
    AnyOptimizer = declared(OptimizerSection)


class ParallelizeSection(Section):
    """Holds what `hyperslab.parallelize` takes; ``kernels`` is a key of the recipe itself."""

    until: Words = ()  # parts of the network before which cut tensors are gathered
    batch_norm: Literal["grid", "replica"] | None = None  # None: as the model's statistics say
    ordinary_inputs: Literal["check", "trust"] = "check"  # whether to compare those beside cut ones
    random_states: Literal["replica", "own"] = "replica"  # whether to equate NumPy's and Python's
    # bf16 is inexact: it rounds them between machines without GPUs and sends half as many bytes
    gradients: Literal["exact", "bf16"] = "exact"


class GridSection(Section):
    """Sets the axes of the grid of ranks, or chooses the best grid: ``grid: auto``."""

    data: PositiveInt = 1  # replicas, over which a mini-batch is cut
    depth: PositiveInt = 1  # ranks along the depth of every sample
    height: PositiveInt = 1  # ranks along the height of every sample
    width: PositiveInt = 1  # ranks along the width of every sample
    auto: bool = Field(
        default=False, exclude=True
    )  # the plan chooses the axes; never in a run's recipe

    @model_validator(mode="before")
    @classmethod
    def _short(cls, values: object) -> object:
        """Read ``grid: auto`` as ``grid: {auto: true}``."""
        return {"auto": True} if values == "auto" else values

    def contradictions(self) -> Iterator[str]:
        if self.auto and self.size > 1:
            yield "grid=auto chooses the axes itself: give no grid.depth or the like"

    @property
    def size(self) -> int:
        return self.data * self.depth * self.height * self.width


OF_A_STEP = ("model", "data", "loss", "optimizer")  # what a plan says of a step depends on


class CheckpointSection(Section):
    """Says when checkpoints are written and how many stay; the best one stays, too."""

    every: PositiveInt = 1  # [epochs]; also after the last epoch
    every_steps: PositiveInt | None = None  # also within epochs
    keep: PositiveInt = 2  # the newest ones
    background: bool = False  # write while the steps go on, from a copy in host memory


RegressionLoss = Literal["mse", "l1", "gaussian"]
SegmentationLoss = Literal[
    "cross_entropy", "dice", "generalised_dice", "focal", "dice_cross_entropy"
]
BY_NAME, BY_TARGET = "(a name)", "(a target)"
"""Marks of the two ways to say what computes a loss; in brackets: no key is called so."""


def _way(value: Any) -> str:
    return BY_NAME if isinstance(value, str) else BY_TARGET


AnyLoss = Annotated[
    Annotated[Literal[RegressionLoss, SegmentationLoss], Tag(BY_NAME)]
    | Annotated[TargetSection, Tag(BY_TARGET)],
    Discriminator(_way),
]


LOGGERS = {
    "tensorboard": "hyperslab.train.loggers.TensorboardLog",
    "wandb": "hyperslab.train.loggers.WandbLog",
    "mlflow": "hyperslab.train.loggers.MlflowLog",
}
"""Loggers by their names in a recipe, each a `ScalarLog` that is imported when a run has it."""


if TYPE_CHECKING:
    LoggerName = str
else:
    LoggerName = Literal[("csv", *LOGGERS)]

AnyLogger = Annotated[
    Annotated[LoggerName, Tag(BY_NAME)] | Annotated[TargetSection, Tag(BY_TARGET)],
    Discriminator(_way),
]


COLUMN_TITLE = re.compile(r"\w[\w .%@()/-]*")  # what may head a column of ``epochs.csv``


class Recipe(CodeSection):
    """One training run."""

    model: AnyModel = CosmoFlowSection()  # the network
    data: DataSection  # the volumes, and how they are read
    grid: GridSection = GridSection()  # how ranks cut mini-batches and volumes
    optimizer: AnyOptimizer = AdamSection()  # the optimizer and its learning rate
    # a name, or a target; gaussian: the network predicts means and their covariance
    loss: AnyLoss = "mse"
    # further measures, by their names in the history; each is the mean over the samples of a split
    metrics: dict[str, AnyLoss] = Field(default={})
    parallelize: ParallelizeSection = ParallelizeSection()  # how the network is cut
    epochs: PositiveInt = 130  # passes over the training split
    # the decay per step of a moving average of the weights, which is validated and used
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    stop_at: StopSection | None = None  # end the run once the validation is as good as this
    mlperf: MlperfSection | None = None  # write MLPerf's log
    # tf32: products of float32 on a CUDA device; bf16 and float16: torch's autocast
    precision: Literal["float32", "tf32", "bf16", "float16"] = "float32"
    # of convolutions: chosen by a rule from types and shapes, or by torch. With "measure" cuDNN
    # tries its own on a CUDA device; on the CPU it means fixed
    kernels: Literal["measure", "fixed", "torch"] = "measure"
    # how to save memory at the cost of time, see `hyperslab.parallelize`; auto: the plan chooses
    # the fastest that fits. "keep" is an older name for none
    memory: Annotated[
        Literal["auto", "none", "tile", "recompute", "offload"],
        BeforeValidator(lambda memory: "none" if memory == "keep" else memory),
    ] = "none"
    # cuda: one rank per device, by NCCL; cuda-shared: several ranks per device, by gloo, for tests
    device: Literal["auto", "cpu", "cuda", "cuda-shared"] = "auto"
    seed: Seed = 0  # for the weights and dropout
    output: UserPath  # the run's folder
    checkpoint: CheckpointSection = CheckpointSection()  # when they are written, and how many stay
    loggers: tuple[AnyLogger, ...] = ("csv",)  # names, or targets; csv is always written
    # write layers.csv: what layers say and their gradients, in the first of so many steps each
    layers: PositiveInt | None = None
    follow_test: bool = False  # record the test loss by epoch, for figures only
    timeout: PositiveFloat = 600  # [s], the longest wait of a rank for the others
    peak: PositiveFloat | None = None  # [flop/s], of a rank's device; --profile measures it
    # classes of the objects passed to `hyperslab.fit`, by key; hyperslab writes this itself
    handed_in: dict[str, str] = Field(default={})

    def contradictions(self) -> Iterator[str]:
        """Find sections that do not go together: most have to suit the network."""
        model, data = self.model, self.data
        if self.segments and self.stop_at is not None and self.stop_at.validation_mae:
            yield (
                f"stop_at.validation_mae does not go with model.name={model.name}, which "
                "predicts no numbers: use stop_at.validation_loss"
            )
        if self.segments and self.mlperf is not None:
            yield f"mlperf does not go with model.name={model.name}"
        if model.segments is not None and isinstance(self.loss, str):
            losses = get_args(SegmentationLoss if model.segments else RegressionLoss)
            if self.loss not in losses:
                yield (
                    f"loss={self.loss} does not go with model.name={model.name}: "
                    f"use one of {', '.join(losses)}"
                )
            if self.loss == "gaussian" and getattr(model, "bounded", False):
                yield (
                    f"loss=gaussian does not go with model.variant={getattr(model, 'variant', '')}"
                    ", whose tanh would bound the covariance, too: use paper2020 or sc18"
                )
        if data.batch_size < model.least_batch:
            yield (
                f"data.batch_size={data.batch_size} does not go with model.name="
                f"{model.name}, which needs {model.least_batch} samples in a mini-batch"
            )
        logs = data.window is None and data.transform in ("auto", "log1p", "log1p_mean")
        if getattr(model, "summary_statistics", False) and not logs:
            given = f"window={data.window}" if data.window else f"transform={data.transform}"
            yield (
                f"model.summary_statistics are those of log(1 + count), but data.{given}: "
                "use data.transform log1p or log1p_mean"
            )
        own = getattr(model, "statistics", "grid")
        if own != "grid" and self.parallelize.batch_norm not in (None, own):
            yield (
                f"model.statistics={own} and parallelize.batch_norm={self.parallelize.batch_norm} "
                "set the same thing: give one of them"
            )

    @field_validator("output", mode="before")
    @classmethod
    def _named(cls, output: Any) -> Any:
        if output == "":  # which would be the current folder
            raise ValueError("it should be a path")
        return output

    @field_validator("loss")
    @classmethod
    def _with_a_target(cls, loss: Any) -> Any:
        if isinstance(loss, TargetSection) and loss.target is None:
            raise ValueError("give a name, such as mse, or a section with a target")
        return loss

    @field_validator("metrics")
    @classmethod
    def _with_targets(cls, metrics: dict[str, Any]) -> dict[str, Any]:
        for name, metric in metrics.items():
            if not COLUMN_TITLE.fullmatch(name):
                raise ValueError(
                    f"{name!r} cannot head a column of epochs.csv: letters, digits, blanks and "
                    "_ . % @ ( ) / - can"
                )
            cls._with_a_target(metric)
        return metrics

    @property
    def segments(self) -> bool | None:
        """Say whether every voxel gets a class; None where only the data can tell."""
        if self.model.segments is not None:
            return self.model.segments
        if isinstance(self.loss, str):
            return self.loss in get_args(SegmentationLoss)
        if self.data.synthetic is not None:
            return self.data.synthetic.classes is not None
        return None

    @property
    def expected_shape(self) -> tuple[int, int, int, int]:
        """Return the shape (C, D, H, W) of volumes that are not here, as keys say (`DataError`)."""
        data = self.data
        cosmoflow = self.model if isinstance(self.model, CosmoFlowSection) else None
        width = data.subvolume or (None if cosmoflow is None else cosmoflow.width)
        if data.shape is not None:
            return data.shape
        if width is None:
            raise DataError(
                f"{data.where} is not on this machine, so the shape of its volumes is unknown\n"
                "    give it: --shape C,D,H,W, such as --shape 4,512,512,512, or data.shape"
            )
        one = self.segments or (cosmoflow and cosmoflow.variant == "sc18")
        channels = 1 if one else 4
        return channels if data.redshifts is None else len(data.redshifts), width, width, width

    def check_targets_exist(self, *sections: str) -> None:
        """Refuse targets that are not found or must not be imported; imports none (`RecipeError`).

        Only those of ``sections`` count, where any are given: a command need not use all.
        """
        named: dict[str, object] = {"model": self.model, "data": self.data, "loss": self.loss}
        named |= {"optimizer": self.optimizer, "optimizer.schedule": self.optimizer.schedule}
        named |= {f"metrics.{name}": metric for name, metric in self.metrics.items()}
        named |= {f"loggers.{place}": logger for place, logger in enumerate(self.loggers)}
        for key, section in named.items():
            used = (not sections or key in sections) and key not in self.handed_in
            if used and isinstance(section, TargetSection) and section.target:
                check_exists(section.target, f"{key}.target", section.trust)

    @property
    def known_extents(self) -> tuple[int, ...]:
        """Return the voxels (D, H, W) of a volume as keys say them, and nothing where none do."""
        data = self.data
        extents: tuple[int, ...] = ()
        if data.subvolume is not None:
            extents = (data.subvolume,) * 3
        elif data.synthetic is not None:
            extents = data.synthetic.shape[1:]
        elif isinstance(self.model, CosmoFlowSection) and self.model.width is not None:
            extents = (self.model.width,) * 3
        multiple = data.multiple or 1
        return tuple(math.ceil(extent / multiple) * multiple for extent in extents)

    def check_extents(self) -> None:
        """Refuse volumes that the network does not take, where keys say which (`RecipeError`)."""
        if extents := self.known_extents:
            self.model.check_extents(extents, self.data.where)

    def check_cuts(self, extents: tuple[int, ...] | None = None) -> None:
        """Refuse more ranks along an axis than volumes (D, H, W) have voxels (`LayoutError`).

        Without ``extents`` where keys say how many these are.
        """
        known = extents or self.known_extents
        for axis, voxels in zip(("depth", "height", "width"), known, strict=False):
            shards = getattr(self.grid, axis)
            if shards > voxels:
                raise LayoutError(
                    f"cannot cut volumes of {voxels} voxels along {axis} into {shards} shards\n"
                    f"    use grid.{axis}<={voxels}"
                )

    @property
    def undecided(self) -> bool:
        """Tell whether the plan has to choose something before ranks can train."""
        return self.grid.auto or self.memory == "auto"

    @property
    def statistics(self) -> str:
        """Choose batch norm's statistics: the whole grid's mini-batch, or each replica's."""
        own: str = getattr(self.model, "statistics", "grid")
        return self.parallelize.batch_norm or own


def planned_device(recipe: Recipe) -> str:
    """Return the kind of device on which the recipe computes here, ``cuda`` or ``cpu``."""
    cuda = recipe.device == "cuda"
    if recipe.device == "auto":
        import torch

        cuda = torch.cuda.is_available()
    return "cuda" if cuda else "cpu"
