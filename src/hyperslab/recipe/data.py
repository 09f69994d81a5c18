"""What a recipe may say of the volumes and of how they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    ByteSize,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from hyperslab.errors import DataError
from hyperslab.formats import registry
from hyperslab.formats.plugins import load_plugins
from hyperslab.formats.shared.reach import Allowed
from hyperslab.formats.source import Source
from hyperslab.recipe.section import Section
from hyperslab.recipe.synthetic import SyntheticSection


@dataclass(frozen=True, slots=True)
class OneOf:
    """Marks a key that takes one of a list of words that may grow; for errors."""

    words: Callable[[], Sequence[str]]


def _registered(format: str) -> str:
    if format not in registry.names():
        raise ValueError("it is no registered format")
    return format


FormatName = Annotated[str, AfterValidator(_registered), OneOf(registry.names)]


class DataSection(Section):
    """The volumes and how they are read."""

    path: Path | None = None  # a folder; or
    synthetic: SyntheticSection | None = None  # made in memory, in place of files
    batch_size: PositiveInt  # samples over all ranks
    redshifts: tuple[NonNegativeFloat, ...] | None = None  # of the channels read; None: all
    targets: tuple[str, ...] | None = None  # the parameters to train, by name; None: all
    subvolume: PositiveInt | None = None  # cut every cube into cubes of this width
    plugins: tuple[str, ...] = ()  # modules to import, which register formats
    format: FormatName | None = None  # None: found out
    channels: Literal["first", "last"] | None = None  # None: found out
    transform: Literal["auto", "log1p", "mean"] | None = "auto"  # log1p of counts, none of scans
    window: tuple[float, float] | None = None  # [HU], becomes [0, 1]; takes the transform's place
    augment: bool = False  # flips, and axis permutations where voxels have no classes
    fractions: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = (0.8, 0.1, 0.1)
    splits: Literal["drawn", "folders"] = "drawn"  # or sub-folders train, validation, test
    # volumes to train, validate and test on, in place of fractions; train null: what is left
    counts: tuple[NonNegativeInt | None, NonNegativeInt, NonNegativeInt] | None = None
    repeat: PositiveInt = 1  # how often an epoch shows every sample to train on
    seed: NonNegativeInt = 0  # of the split and of the order
    driver: Literal["mpio"] | None = None  # read HDF5 together, by MPI-IO
    mode: Literal["direct", "store", "preload"] = "store"  # whether boxes are kept, see `open`
    budget: ByteSize | None = None  # of a rank's store, "8GiB" say; None: half of what is free
    staging: Path | None = None  # a folder of the node for what does not fit into the budget
    outside_files: bool = False  # HDF5 files may take values from files outside of the folder
    missing_chunks: bool = False  # what HDF5 and Zarr do not store is their fill value
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

    @field_validator("redshifts", "targets")
    @classmethod
    def _some(cls, chosen: tuple[object, ...] | None) -> tuple[object, ...] | None:
        if chosen is not None and not chosen:
            raise ValueError("give one at least, or null for all")
        return chosen

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
        keys = ["format", "channels", "driver", "redshifts", "outside_files", "missing_chunks"]
        of_files = [key for key in keys if getattr(self, key)]
        if self.splits == "folders":
            of_files.append("splits=folders")
        if self.synthetic is not None and of_files:
            raise ValueError(f"data.{of_files[0]} is of files, but data.synthetic reads none")
        return self

    @property
    def allowed(self) -> Allowed:
        """What files may do."""
        return Allowed(self.outside_files, self.missing_chunks)

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
