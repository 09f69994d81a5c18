"""Cutting each volume into cubes that are samples of their own."""

from __future__ import annotations

import itertools

from hyperslab.errors import LayoutError
from hyperslab.formats.extras import Extras
from hyperslab.formats.source import Array, Source, SourceView, VolumePart
from hyperslab.geometry import Box


class Subvolumes(SourceView):
    """Each volume (C, D, H, W) of ``source`` as (D/W')(H/W')(W/W') samples (C, W', W', W').

    W' is ``width``. Sample ``{name}_{ix}_{iy}_{iz}`` begins at (ix, iy, iz)·W' along depth, height
    and width of its volume; samples are ordered by volume, then ix, then iy, then iz. So 512³ cubes
    become the 128³ data set of Oyama et al. 2020, section V-A. The target is the volume's; labels
    are those of the voxels.

    Raises:
        LayoutError: volumes differ in shape, or an extent is not a multiple of ``width``.
    """

    def __init__(self, source: Source, width: int) -> None:
        channels, *extents = source.shape
        if source.shapes:
            raise LayoutError(
                f"cannot cut volumes of different shapes into sub-volumes of {width}: bring them "
                "to one shape first"
            )
        if width < 1 or any(extent % width for extent in extents):
            raise LayoutError(
                f"cannot cut {source.where(0)} of {' x '.join(map(str, extents))} voxels into "
                f"sub-volumes of {width}: every extent has to be a multiple of it"
            )
        self.source = source
        self.take_after(source)
        self.shape = (channels, width, width, width)
        self.places = list(itertools.product(*(range(extent // width) for extent in extents)))
        self.names = [
            f"{name}_{ix}_{iy}_{iz}" for name in source.names for ix, iy, iz in self.places
        ]
        volumes = [name for name in source.names for _ in self.places]
        self.splits = {
            name: source.splits[volume]
            for name, volume in zip(self.names, volumes, strict=True)
            if volume in source.splits
        }

    def origin(self, sample: int) -> tuple[Source, int]:
        return self.source, sample // len(self.places)

    def read(self, sample: int, box: Box) -> Array:
        volume, offset = self._place(sample)
        return self.source.read(volume, box.shift((0, *offset)))

    def labels(self, sample: int, box: Box) -> Array:
        volume, offset = self._place(sample)
        return self.source.labels(volume, box.shift(offset))

    def unpadded(self, sample: int) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.source.shape

    def part(self, sample: int) -> VolumePart:
        volume, number = divmod(sample, len(self.places))
        return VolumePart(self.source.names[volume], self.places[number], number)

    def storage(self, sample: int) -> None:
        """Not known: the volume's would be of more than the sample."""

    def extras(self, sample: int) -> Extras:
        """Those of the volume but for the attributes and the affine, which speak of the whole."""
        whole = self.source.extras(sample // len(self.places))
        return Extras(whole.keys, whole.names, whole.target, whole.arrays)

    def where(self, sample: int) -> str:
        place = self.places[sample % len(self.places)]
        return f"{self.source.where(sample // len(self.places))}, sub-volume {place}"

    def _place(self, sample: int) -> tuple[int, tuple[int, ...]]:
        """The volume of a sample, and where in it the sample begins."""
        volume, place = divmod(sample, len(self.places))
        return volume, tuple(i * self.shape[1] for i in self.places[place])

    def close(self) -> None:
        self.source.close()
