"""Declares the networks that a recipe may name, each with how it is made for some data.

A network is one class derived from `ModelSection`, here or in a module of its own that
`hyperslab.recipe.schema` imports: the recipe's names are those of the classes. What they make is
plain torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PositiveInt

from hyperslab import models
from hyperslab.errors import RecipeError
from hyperslab.models.widths import check_width
from hyperslab.recipe.instantiate import A_NETWORK, Maker
from hyperslab.recipe.optimizer import Probability
from hyperslab.recipe.section import CodeSection, NamedSection, TargetSection

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


class NetworkSection(NamedSection):
    """Holds what all networks have. Their channels, outputs and classes are those of the data."""

    # a class for every voxel, or numbers for the volume; None: as the data have
    segments: ClassVar[bool | None] = False
    least_batch: ClassVar[int] = 1  # samples in a mini-batch

    @property
    def words(self) -> str:
        """Return the words by which errors call the network."""
        return f"model.name={self.name}"

    def check_extents(self, extents: Shape, where: str) -> None:
        """Refuse volumes (D, H, W) that the network does not take, without torch (`RecipeError`).

        ``where``: what has them.
        """

    def build(self, shape: Shape, outputs: int, *, where: str) -> torch.nn.Module:
        """Make the network for samples of this ``shape`` (C, D, H, W); weights are torch's.

        ``outputs``: its classes or numbers; ``where``: what has the samples, for errors.

        Raises:
            RecipeError: it is for volumes of another size, or cannot be made.
        """
        raise NotImplementedError


class ModelSection(NetworkSection):
    """Holds what the networks that come along have."""

    statistics: Literal["grid", "replica"] = "grid"  # of batch norm: over all, or per replica


class CosmoFlowSection(ModelSection):
    """Leads from volumes to numbers."""

    name: Literal["cosmoflow"] = "cosmoflow"
    # layers as in Oyama et al. 2020, Mathuriya et al. 2018, LBANN's example, or MLPerf HPC
    variant: Literal["paper2020", "sc18", "lbann", "mlperf"] = "paper2020"
    width: PositiveInt | None = None  # voxels along each side; a given one is checked
    batch_norm: bool = False  # after each convolution
    dropout: Probability | None = None  # of dropping a value; None: the variant's own

    @property
    def bounded(self) -> bool:
        """Tell whether a tanh bounds all outputs, as is right for means alone."""
        return self.variant in ("lbann", "mlperf")

    def check_extents(self, extents: Shape, where: str) -> None:
        width = self.width or extents[0]
        if list(extents) != [width] * 3:
            raise RecipeError(
                f"{where} holds volumes of {list(extents)} voxels but the model takes "
                f"{[width] * 3}\n    set model.width or data.subvolume"
            )
        try:
            check_width(self.variant, width)
        except ValueError as error:
            raise RecipeError(f"model.width, model.variant: {error}") from None

    def build(self, shape: Shape, outputs: int, *, where: str) -> torch.nn.Module:
        self.check_extents(shape[1:], where)
        return models.CosmoFlow(
            shape[1],
            variant=self.variant,
            in_channels=shape[0],
            outputs=outputs,
            batch_norm=self.batch_norm,
            dropout=self.dropout,
        )


class MultiscaleSection(ModelSection):
    """Leads from volumes to numbers, by statistics of features at every scale."""

    least_batch: ClassVar[int] = 2  # their features' variance is taken
    name: Literal["multiscale"]
    channels: tuple[PositiveInt, ...] = (16, 32, 64, 128)  # by stage; none: the volume's own
    hidden: PositiveInt = 256  # width of the head's hidden layers
    dropout: Probability = 0.0  # in the head
    periodic: bool = True  # the volumes are, so convolutions go on at the other side
    # of log(1 + count): the head reads spectra, between channels too, and the counts' distribution
    summary_statistics: bool = False

    def check_extents(self, extents: Shape, where: str) -> None:
        stages = len(self.channels)
        if min(extents) >> stages == 0:
            raise RecipeError(
                f"model.channels names {stages} stages, which need volumes of at least "
                f"{1 << stages} voxels along each side, but they have {list(extents)}"
            )

    def build(self, shape: Shape, outputs: int, *, where: str) -> torch.nn.Module:
        self.check_extents(shape[1:], where)
        return models.MultiscaleNet(
            shape[0],
            outputs,
            channels=self.channels,
            hidden=self.hidden,
            dropout=self.dropout,
            periodic=self.periodic,
            summary_width=max(shape[1:]) if self.summary_statistics else None,
        )


class UNet3DSection(ModelSection):
    """Leads from volumes to a class for every voxel."""

    segments: ClassVar[bool | None] = True
    name: Literal["unet3d"]
    channels: PositiveInt = 32  # after the first convolution
    levels: PositiveInt = 3  # poolings

    def check_extents(self, extents: Shape, where: str) -> None:
        if min(extents) >> self.levels == 0:
            raise RecipeError(
                f"model.levels={self.levels} needs volumes of at least {1 << self.levels} voxels "
                f"along each side, but they have {list(extents)}"
            )

    def build(self, shape: Shape, outputs: int, *, where: str) -> torch.nn.Module:
        self.check_extents(shape[1:], where)
        return models.UNet3D(shape[0], outputs, channels=self.channels, levels=self.levels)


class TargetModel(TargetSection, NetworkSection):
    """A class derived from `torch.nn.Module`; whether it segments follows from the data."""

    segments: ClassVar[bool | None] = None
    name: Literal["target"] = "target"

    @property
    def words(self) -> str:
        return f"model.target {self.target}"

    def check(self) -> None:
        Maker("model", A_NETWORK).check(self)

    def build(self, shape: Shape, outputs: int, *, where: str) -> torch.nn.Module:
        references = references_to_data(shape, outputs)
        made: torch.nn.Module = Maker("model", A_NETWORK, references=references)(self)
        return made


class PythonModel(CodeSection, NetworkSection):
    """A network that a program has handed to `hyperslab.fit`; no one writes this in a recipe."""

    segments: ClassVar[bool | None] = None
    name: Literal["python"]
    python_class: str  # its dotted name
    digest: str  # of its parts and their settings

    @property
    def words(self) -> str:
        return f"the network {self.python_class}"


def references_to_data(shape: Shape, outputs: int) -> dict[str, Any]:
    """Return the values that a recipe's ``${...}`` may stand for."""
    return {"data.channels": shape[0], "data.extents": list(shape[1:]), "data.outputs": outputs}
