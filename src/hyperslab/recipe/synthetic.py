"""What a recipe may say of volumes that no file holds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from hyperslab.formats.synthetic import SyntheticVolumes
from hyperslab.recipe.section import Section


class SyntheticSection(Section):
    """Volumes of random counts, made in memory, for measuring; see `SyntheticVolumes`."""

    width: PositiveInt | None = None  # voxels along each side
    extents: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None  # or D, H and W
    channels: PositiveInt = 4  # of each volume
    samples: PositiveInt = 128  # of all splits
    targets: PositiveInt | None = None  # numbers to predict; None: 4 where there are no classes
    classes: Annotated[int, Field(ge=2, le=256)] | None = None  # of the voxels, if they have any

    @model_validator(mode="after")
    def _one_of_each(self) -> SyntheticSection:
        if (self.width is None) == (self.extents is None):
            raise ValueError(
                "data.synthetic needs width=N (voxels along each side) or extents=[D, H, W], one "
                "of them"
            )
        if self.targets is not None and self.classes is not None:
            raise ValueError(
                "data.synthetic.targets and data.synthetic.classes do not go together: targets are "
                "for networks that predict numbers, classes for those that segment"
            )
        return self

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(C, D, H, W) of a volume."""
        if self.extents is not None:
            return (self.channels, *self.extents)
        assert self.width is not None
        return (self.channels, self.width, self.width, self.width)

    def source(self) -> SyntheticVolumes:
        """The volumes."""
        targets = 4 if self.targets is None else self.targets
        return SyntheticVolumes(
            self.shape, self.samples, targets=targets, classes=self.classes or 0
        )
