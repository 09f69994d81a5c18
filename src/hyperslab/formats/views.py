"""Shows sources in another way: joined, with fewer channels or targets, in cubes, or padded.

`Joined` puts several folders one after another, `Selected` keeps some of the redshifts and
parameters, `Subvolumes` cuts each volume into cubes that are samples of their own, and `Padded`
rounds extents up to multiples with a rim that is filled in where boxes are read.
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyperslab.errors import DataError, LayoutError, printable
from hyperslab.formats.files import check_alike
from hyperslab.formats.source import Array, Extras, Source, SourceView, VolumePart
from hyperslab.geometry import Box

if TYPE_CHECKING:  # torch
    from hyperslab.comm import Grid

SAME_LINE = 1e-6
"""The share of a parameter's range by which its line may differ: each folder has fitted one."""

_ALIKE = ("dtype", "classes", "label_bytes", "redshifts", "collective")


class Joined(SourceView):
    """The samples of several folders of one kind, one after the other.

    Names are the paths below the folders' common parent, so that two folders may have samples of
    one name.

    Raises:
        DataError: the folders differ in shape, type, classes or parameters; names both. Or a sample
            is in two of them.
    """

    def __init__(self, parts: dict[Path, Source]) -> None:
        self.parts = parts
        self.root = common_parent(list(parts))
        (first, one), *others = parts.items()
        for folder, part in others:
            _check_alike(first, one, folder, part)
        super().__init__(one)
        self.order = one.order if len({part.order for part in parts.values()}) == 1 else None
        self.targets_apart = any(part.targets_apart for part in parts.values())
        self.summed_whole = all(part.summed_whole for part in parts.values())
        self.concurrent = all(part.concurrent for part in parts.values())
        self.remark = "\n".join(part.remark for part in parts.values() if part.remark)
        self.places = [(part, i) for part in parts.values() for i in range(len(part.names))]
        self.prefixes = [
            _prefix(folder, self.root) for folder, part in parts.items() for _ in part.names
        ]
        names = zip(self.prefixes, self.places, strict=True)
        self.names = [prefix + part.names[i] for prefix, (part, i) in names]
        name, count = Counter(self.names).most_common(1)[0]
        if count > 1:
            raise DataError(
                f"{', '.join(map(str, parts))}: hold the sample {printable(name)!r} {count} times, "
                "as one folder lies in another, or is given twice\n    give each folder once"
            )
        shapes = tuple(part.shape_of(i) for part, i in self.places)
        self.shape = max(shapes, key=math.prod)
        self.shapes = shapes if len(set(shapes)) > 1 else ()
        self.splits = {
            name: part.splits[part.names[i]]
            for name, (part, i) in zip(self.names, self.places, strict=True)
            if part.names[i] in part.splits
        }

    def origin(self, sample: int) -> tuple[Source, int]:
        return self.places[sample]

    def volume(self, sample: int) -> str:
        return self.prefixes[sample] + super().volume(sample)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.shape if self.shapes else self.places[0][0].whole_shape

    def alone(self, sample: int) -> Source:
        part, own = self.places[sample]
        return part.alone(own)

    def read_together(self, driver: str, grid: Grid) -> Source:
        return Joined({at: part.read_together(driver, grid) for at, part in self.parts.items()})

    def close(self) -> None:
        for part in self.parts.values():
            part.close()


def joined(parts: dict[Path, Source]) -> Source:
    """Joins the sources of folders; a single one stays as it is."""
    if not parts:
        raise DataError("no folder is given; give at least one")
    return next(iter(parts.values())) if len(parts) == 1 else Joined(parts)


def common_parent(folders: Sequence[Path]) -> Path:
    """Returns the deepest folder that holds all of them."""
    return Path(os.path.commonpath([os.path.abspath(folder) for folder in folders]))


def _prefix(folder: Path, root: Path) -> str:
    """
    >>> _prefix(Path("/data/b/train"), Path("/data")), _prefix(Path("/data"), Path("/data"))
    ('b/train/', '')
    """
    relative = Path(os.path.relpath(folder, root)).as_posix()
    return "" if relative == "." else f"{relative}/"


def _check_alike(first: Path, one: Source, folder: Path, other: Source) -> None:
    scans = bool(one.classes) and one.shape[0] == other.shape[0]  # shown one by one
    words = _ALIKE if scans else ("shape", *_ALIKE)
    stored, wanted = ({word: getattr(part, word) for word in words} for part in (other, one))
    check_alike(folder, stored, first, wanted)
    named = [source.channel_names for source in (one, other) if source.channel_names]
    if len(set(named)) > 1:
        raise DataError(
            f"{folder}: has the channels {', '.join(named[1])} but {first} has "
            f"{', '.join(named[0])}; all folders of a data set have the same ones in one order"
        )
    if one.classes:
        return
    ours = one.parameters
    theirs = other.parameters
    if ours.names != theirs.names:
        raise DataError(
            f"{folder}: has the targets {', '.join(theirs.names)} but {first} has "
            f"{', '.join(ours.names)}"
        )
    ends = [np.array(list(p.ranges.values())).reshape(-1, 2) for p in (ours, theirs)]
    size = np.abs(ends[0]).max(1, initial=0)
    if (np.abs(ends[0] - ends[1]).max(1, initial=0) > SAME_LINE * size).any():
        raise DataError(
            f"{folder}: -1 and 1 of its targets are {theirs.ranges} but those of {first} are "
            f"{ours.ranges}\n    give the ranges of all: data.ranges: {{name: [low, high]}}"
        )


SAME_NAMES = (("n_s", "N_spec"),)
"""Two names of one parameter: ours, and that of the public files."""

CLOSE = 1e-6
"""Redshifts this far apart are the same: files round them."""


class Selected(SourceView):
    """The samples of ``source`` with the channels of these redshifts, and these targets alone.

    ``None`` keeps all of them. Channels and targets come in the order asked for. Of a box the
    channels from the first to the last asked for are read, those between them too.

    Raises:
        DataError: a redshift or a parameter is not there, or twice; no file says which redshifts
            the channels are; or targets are asked for where voxels have classes.
    """

    def __init__(
        self,
        source: Source,
        *,
        redshifts: Sequence[float] | None = None,
        targets: Sequence[str] | None = None,
    ) -> None:
        super().__init__(source)
        self.channels = tuple(range(source.shape[0]))
        self.chosen = tuple(range(len(source.parameters.names)))
        if redshifts is not None:
            self.channels = channels_of(source, source.redshifts, redshifts)
            self.redshifts = tuple(source.redshifts[channel] for channel in self.channels)
            self.stored_redshifts = source.redshifts
        if targets is not None:
            self.chosen = _targets_of(source, targets)
        self.shape = (len(self.channels), *source.shape[1:])
        self.shapes = tuple((len(self.channels), *shape[1:]) for shape in source.shapes)
        if source.channel_names:
            self.channel_names = tuple(source.channel_names[c] for c in self.channels)
        self.splits = source.splits
        self.parameters = source.parameters.only(self.chosen)

    def read(self, sample: int, box: Box) -> Array:
        wanted = self.channels[box.lo[0] : box.hi[0]]
        lo = min(wanted)
        hi = max(wanted) + 1
        whole = self.source.read(sample, Box((lo, *box.lo[1:]), (hi, *box.hi[1:])))
        if wanted == tuple(range(lo, hi)):
            return whole
        return whole[[channel - lo for channel in wanted]]

    def target(self, sample: int) -> Array:
        return np.asarray(self.source.target(sample))[list(self.chosen)]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return (len(self.channels), *self.source.whole_shape[1:])

    def extras(self, sample: int) -> Extras:
        """Selects the extras of the source, arrays too as far as chosen, but for the attributes."""
        whole = self.source.extras(sample)
        if self.classes:
            return whole
        parts = {"physPar": self.chosen, "redshifts": self.channels}
        arrays = {
            key: np.asarray(whole.arrays[key])[list(part)]
            for key, part in parts.items()
            if key in whole.arrays
        }
        return Extras(whole.keys, self.parameters.names, self.target(sample), arrays)


def selected(
    source: Source,
    redshifts: Sequence[float] | None,
    targets: Sequence[str] | None,
    width: int | None = None,
    multiple: int | None = None,
) -> Source:
    """Shows what is asked for, or all: some channels and targets, sub-volumes of a width, a rim.

    Raises as `Selected`, `Subvolumes` and `Padded`.
    """
    if redshifts is not None or targets is not None:
        source = Selected(source, redshifts=redshifts, targets=targets)
    if width is not None:
        source = Subvolumes(source, width)
    return source if multiple is None else Padded(source, multiple)


def channels_of(source: Source, known: Sequence[float], wanted: Sequence[float]) -> tuple[int, ...]:
    """Returns the channel of each wanted redshift, where those of the channels are ``known``."""
    if not known:
        raise DataError(
            f"{source.where(0)}: does not say which redshifts its "
            f"{source.shape[0]} channels are, and neither do the other "
            "files\n    leave data.redshifts out to read all of them"
        )
    found = []
    for redshift in wanted:
        near = [c for c, other in enumerate(known) if abs(other - redshift) <= CLOSE]
        if not near or near[0] in found:
            words = "asked for twice" if near else "not there"
            raise DataError(
                f"redshift {redshift:g} is {words}: {source.where(0)} has the redshifts "
                f"{', '.join(f'{other:g}' for other in known)}"
            )
        found.append(near[0])
    if not found:
        raise DataError("no redshift is asked for: give at least one, or leave it out for all")
    return tuple(found)


def _targets_of(source: Source, wanted: Sequence[str]) -> tuple[int, ...]:
    if source.classes:
        raise DataError(
            f"{source.where(0)}: has a class for every voxel and no parameters to choose from"
        )
    names = source.parameters.names
    found = []
    for name in (wanted,) if isinstance(wanted, str) else wanted:
        other = next((pair[1 - pair.index(name)] for pair in SAME_NAMES if name in pair), name)
        index = next((i for i, n in enumerate(names) if n in (name, other)), None)
        if index is None or index in found:
            words = "asked for twice" if index is not None else "not there"
            raise DataError(
                f"parameter {name!r} is {words}{_nearest(name, names)}; {source.where(0)} has "
                f"{', '.join(names)}"
            )
        found.append(index)
    if not found:
        raise DataError("no parameter is asked for: give at least one, or leave it out for all")
    return tuple(found)


def _nearest(name: str, names: Sequence[str]) -> str:
    lower = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    return f", perhaps {lower[close[0]]!r}" if close and lower[close[0]] != name else ""


class Subvolumes(SourceView):
    """Each volume (C, D, H, W) of ``source`` as (D/W')(H/W')(W/W') samples (C, W', W', W').

    W' is ``width``. Sample ``{name}_{ix}_{iy}_{iz}`` begins at (ix, iy, iz)·W' along depth, height
    and width of its volume; samples are ordered by volume, then ix, then iy, then iz. So 512³ cubes
    become the 128³ data set of Oyama et al. 2020, section V-A. A sample has the target of its
    volume and the labels of its voxels.

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
        super().__init__(source)
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

    def _begin(self, sample: int) -> tuple[int, ...]:
        """Returns where in its volume a sample begins, (D, H, W)."""
        return tuple(i * self.shape[1] for i in self.places[sample % len(self.places)])

    def read(self, sample: int, box: Box) -> Array:
        return super().read(sample, box.shift((0, *self._begin(sample))))

    def labels(self, sample: int, box: Box) -> Array:
        return super().labels(sample, box.shift(self._begin(sample)))

    def unpadded(self, sample: int) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.source.shape

    def part(self, sample: int) -> VolumePart:
        volume, number = divmod(sample, len(self.places))
        return VolumePart(self.source.names[volume], self.places[number], number)

    def storage(self, sample: int) -> None:
        """Returns None: the volume's storage has more than the sample."""

    def extras(self, sample: int) -> Extras:
        """Takes the extras of the volume but for attributes and affine, which are of the whole."""
        whole = super().extras(sample)
        return Extras(whole.keys, whole.names, whole.target, whole.arrays)

    def where(self, sample: int) -> str:
        place = self.places[sample % len(self.places)]
        return f"{super().where(sample)}, sub-volume {place}"


class Padded(SourceView):
    """The samples of ``source``, their extents rounded up to multiples of ``multiple``.

    A network that halves its input several times, and joins what it was with what it becomes, needs
    such extents. The added voxels come after the last ones along D, H and W; they hold ``fill`` and
    are of the first class, the background.

    Raises:
        DataError: ``multiple`` is less than 1.
    """

    def __init__(self, source: Source, multiple: int, fill: float = 0) -> None:
        if multiple < 1:
            raise DataError(f"{multiple=}: needs to be >= 1")
        super().__init__(source)
        self.splits = source.splits
        self.multiple = multiple
        self.fill = fill_as(fill, source.dtype)
        shapes = [rounded_up(shape, multiple) for shape in source.shapes or (source.shape,)]
        self.shape = max(shapes, key=math.prod)
        self.shapes = tuple(shapes) if len(set(shapes)) > 1 else ()

    def read(self, sample: int, box: Box) -> Array:
        inner = Box.whole(self.source.shape_of(sample))
        return read_filled(lambda b: self.source.read(sample, b), inner, box, self.fill, self.dtype)

    def labels(self, sample: int, box: Box) -> Array:
        inner = Box.whole(self.unpadded(sample))
        of = self.source
        return read_filled(lambda b: of.labels(sample, b), inner, box, 0, np.dtype(np.uint8))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.source.whole_shape


def rounded_up(shape: Sequence[int], multiple: int) -> tuple[int, ...]:
    """Returns (C, D, H, W) with D, H and W rounded up to multiples.

    >>> rounded_up((1, 9, 8, 10), 4)
    (1, 12, 8, 12)
    """
    channels, *extents = shape
    return (channels, *(-(-extent // multiple) * multiple for extent in extents))


def read_filled(
    read: Callable[[Box], Array], inner: Box, box: Box, fill: float, dtype: np.dtype[Any]
) -> Array:
    """Returns the values of ``box``, which may reach beyond ``inner``: ``fill`` where it does."""
    inside = box.intersect(inner)
    if inside == box:
        return read(box)
    values = np.full(box.shape, fill, dtype)
    if not inside.empty:
        values[inside.slices(box)] = read(inside)
    return values


def fill_as(fill: float, dtype: np.dtype[Any]) -> float:
    """Rounds ``fill`` down to the storage type: what is clipped at it becomes it."""
    if dtype.kind not in "iu":
        return fill
    limits = np.iinfo(dtype)
    return int(min(max(math.floor(fill), limits.min), limits.max))
