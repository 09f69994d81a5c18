"""Defines `Source`, the interface between a storage format and everything that reads samples.

`Extras` is what a file holds beside its voxels, `ScanOptions` all that is said of a folder before
it is scanned. A `SourceView` shows the samples of other sources in another way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError
from hyperslab.formats.files import STRICT, AccessPolicy, DataMap, Refuse
from hyperslab.formats.storage import Storage
from hyperslab.formats.storage_order import Channels, StorageOrder
from hyperslab.formats.targets import Parameters, numbered_names
from hyperslab.geometry import Box

if TYPE_CHECKING:  # torch, which headers do not need
    from hyperslab.comm import Grid

PUBLIC_KEYS = ("full", "unitPar")
"""The keys of the public CosmoFlow files, for what comes from files without keys."""


@dataclass(frozen=True, slots=True)
class Extras:
    """Holds what a file has beside its voxels, for a conversion to another format.

    ``keys``: the keys of volume and targets in a file with keys. ``names``: the names of the
    parameters. ``arrays``: physical values and redshifts, if they are known. ``attributes``: those
    of a file with keys. ``affine`` (4, 4): (d, h, w, 1) to (x, y, z, 1) [mm], RAS+.
    """

    keys: tuple[str, str] = PUBLIC_KEYS
    names: tuple[str, ...] = ()
    target: NDArray[Any] | None = None
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    affine: NDArray[Any] | None = None


Array = NDArray[Any]

M = TypeVar("M", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """Holds the user's options for scanning a folder.

    ``channels``: where they are stored, needed if the shape does not tell. ``format``: the name
    of the format, if the user gave it. ``refuse``: called with the error of each bad file, which is
    then left out; without it the first one is raised. ``allowed``: what files may do. ``mapping``:
    where volumes and targets are, for formats that take it. ``own``: this process has just written
    the files, so no child has to try their headers first.
    """

    channels: Channels | None = None
    format: str | None = None
    refuse: Refuse | None = None
    allowed: AccessPolicy = STRICT
    mapping: DataMap | None = None
    own: bool = False

    def __post_init__(self) -> None:
        """Refuses a ``mapping`` that is something else, such as a dict of its fields."""
        if not isinstance(self.mapping, DataMap | None):
            raise DataError(
                f"mapping={self.mapping!r} is no DataMap; pass hyperslab.formats.DataMap("
                'volume="grid/delta", targets=("Header@Omega0",))'
            )


@dataclass(frozen=True, slots=True)
class VolumePart:
    """Names the volume of a part: the ``place``-th along D, H and W, the ``number``-th of all."""

    volume: str
    place: tuple[int, ...]
    number: int


class Source(ABC):
    """Samples of one shape, each a volume that can be read box by box, with its target or labels.

    A target is P numbers (implement `target`); if ``classes`` names classes, voxels have
    labels (implement `labels`). Implement `read` too and set ``names``, ``shape`` and ``dtype``;
    every rank must set them alike. `hyperslab.open` takes an instance in place of a path;
    a class whose constructor takes a folder can be registered, see `hyperslab.formats.register`.

    ``names``: one per sample, unique. ``shape``: (C, D, H, W) of every volume; if they differ, that
    of the largest, and ``shapes`` has one per sample, all with as many channels. ``dtype``: the
    type in storage, kept until the data is on the device. ``parameters``: names and ranges of the P
    targets, none if voxels have classes; by default ``y0``, ``y1``, ... ``classes``: their names,
    the background's first. ``label_bytes``: stored for the label of one voxel [B]. ``order``: the
    order of the stored dims, if it is known and the same for all samples. ``collective``: the ranks
    of a replica read together, so nothing is read in the background. ``concurrent``: several
    threads may read at once, and gain by it. ``volumes``: by name, the
    volume of each sample that is a part of one. ``remark``: what a user should know about how the
    folder was read. ``redshifts``: those of the channels, if known; ``stored_redshifts``: those of
    all channels of the files, if only some are shown. ``summed_whole``: a checksum covers a whole
    volume, and is compared only if all of it is read. ``targets_apart``: targets are not in the
    files of the volumes, and may change alone. ``lists``: suffixes of files that list samples and
    may be opened in place of a folder. ``channel_names``: what the channels are, if known.
    ``splits``: by name, the split of each sample, if the data set has its own.
    """

    names: Sequence[str]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shapes: Sequence[tuple[int, ...]] = ()
    classes: tuple[str, ...] = ()
    label_bytes: int = 1
    order: StorageOrder | None = None
    collective: bool = False
    concurrent: bool = False
    volumes: Mapping[str, str] = MappingProxyType({})
    remark: str = ""
    redshifts: tuple[float, ...] = ()
    stored_redshifts: tuple[float, ...] = ()
    summed_whole: bool = False
    targets_apart: bool = False
    lists: tuple[str, ...] = ()
    channel_names: tuple[str, ...] = ()
    splits: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> Self:
        """Opens the samples of a folder of this format.

        Called on the main rank alone; the others get what it returns, by pickle.

        Raises:
            DataError: a file is not what it should be.
        """
        return cls(folder)  # type: ignore[call-arg]

    @cached_property
    def parameters(self) -> Parameters:
        """Describes the P targets."""
        count = 0 if self.classes else len(self.target(0))
        return Parameters.normalised(numbered_names(count))

    @abstractmethod
    def read(self, sample: int, box: Box) -> Array:
        """Reads ``box``, which has the four dims of ``shape``, as an array (C, d, h, w).

        Called from a background thread, and from two at once only if it is ``concurrent``. An error
        that is a `DataError`, OSError or EOFError is one of the sample, which may then be skipped.
        """

    def target(self, sample: int) -> Array:
        """Returns the targets (P,) of a sample; called as `read` is, and by others."""
        raise NotImplementedError(f"{type(self).__name__} has neither targets nor classes")

    def labels(self, sample: int, box: Box) -> Array:
        """Reads the class of every voxel of ``box``, which has three dims, as uint8 (d, h, w).

        Called as `read` is.
        """
        raise NotImplementedError(f"{type(self).__name__} has classes but no labels")

    def volume(self, sample: int) -> str:
        """Names the volume from which the sample is cut: samples of one are in the same split."""
        name = self.names[sample]
        return self.volumes.get(name, name)

    def unpadded(self, sample: int) -> tuple[int, ...]:
        """Returns the stored extents (D, H, W) of a sample; the voxels beyond were added."""
        return self.shape_of(sample)[1:]

    def shape_of(self, sample: int) -> tuple[int, ...]:
        """Returns the shape (C, D, H, W) of a sample."""
        return self.shapes[sample] if self.shapes else self.shape

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Returns the shape (C, D, H, W) of the volumes from which the samples are cut."""
        return self.shape

    def part(self, sample: int) -> VolumePart | None:
        """Returns the part of its volume that the sample is; ``None`` if none was cut here."""
        return None

    def where(self, sample: int) -> str:
        """Returns the name of the sample for an error."""
        return f"sample {self.names[sample]!r}"

    def storage(self, sample: int) -> Storage | None:
        """Describes how the volume lies in its file, for `hyperslab inspect`; None if not known.

        Raises:
            DataError: the file cannot be read.
        """
        return None

    def extras(self, sample: int) -> Extras:
        """Reads all that a file has beside the voxels, for `hyperslab convert`.

        Raises:
            DataError: the file cannot be read.
        """
        if self.classes:
            return Extras()
        return Extras(names=self.parameters.names, target=self.target(sample))

    def voxel_size(self, sample: int) -> tuple[float, ...] | None:
        """Returns a scan's size of voxels along D, H and W [mm]; None if its file does not tell.

        Raises:
            DataError: the file cannot be read.
        """
        affine = self.extras(sample).affine if self.classes else None
        if affine is None:
            return None
        sizes = np.linalg.norm(np.asarray(affine)[:3, :3], axis=0)
        return tuple(sizes.tolist()) if np.isfinite(sizes).all() and (sizes > 0).all() else None

    def files(self, sample: int) -> Sequence[Path]:
        """Lists the files whose change means that the sample may have changed; none if not known.

        `hyperslab convert`, run again, then reads the sample again and compares it.
        """
        return ()

    def alone(self, sample: int) -> Source:
        """Makes a source of this sample only, which pickle can send to another process."""
        return SingleSample(self, sample)

    def read_together(self, driver: str, grid: Grid) -> Source:
        """Shows the samples as the ranks of a replica read them together; all ranks call this.

        Raises:
            DataError: the format has no such driver.
        """
        raise DataError(
            f"{self.where(0)}: {driver=} is for HDF5 files\n    hyperslab convert makes such of "
            "others; without the driver every rank reads by itself"
        )

    def close(self) -> None:  # noqa: B027 - most sources hold nothing open
        """Lets go of what is open; a later `read` opens it again."""


_SHOWN = (
    *("names", "shape", "shapes", "dtype", "parameters", "classes", "label_bytes", "order"),
    *("collective", "concurrent", "redshifts", "stored_redshifts", "summed_whole", "targets_apart"),
    "channel_names",
)
"""Names what a view takes from the source that it shows."""


def _of_origin(method: M) -> M:
    """Makes a method of a `SourceView` that asks the source which is shown for its sample."""

    def ask(self: SourceView, sample: int, *box: Box) -> Any:
        source, own = self.origin(sample)
        return getattr(source, method.__name__)(own, *box)

    return cast(M, ask)


class SourceView(Source):
    """Shows the samples of another source in another way.

    It begins as the source is. Set what differs and implement it; what is not implemented is as the
    sample of the other source has it. Of several sources, implement `origin` and `close`.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        for name in _SHOWN:
            setattr(self, name, getattr(source, name))

    def origin(self, sample: int) -> tuple[Source, int]:
        """Returns the source and its sample that is shown as ``sample``."""
        return self.source, sample

    def close(self) -> None:
        self.source.close()

    read = _of_origin(Source.read)
    target = _of_origin(Source.target)
    labels = _of_origin(Source.labels)
    volume = _of_origin(Source.volume)
    unpadded = _of_origin(Source.unpadded)
    part = _of_origin(Source.part)
    where = _of_origin(Source.where)
    storage = _of_origin(Source.storage)
    extras = _of_origin(Source.extras)
    voxel_size = _of_origin(Source.voxel_size)
    files = _of_origin(Source.files)


class SingleSample(SourceView):
    """Shows one sample of another source."""

    def __init__(self, source: Source, sample: int) -> None:
        super().__init__(source)
        self.sample = sample
        self.names = (source.names[sample],)
        self.shape = source.shape_of(sample)
        self.shapes = ()

    def origin(self, sample: int) -> tuple[Source, int]:
        return self.source, self.sample
