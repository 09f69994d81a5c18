"""Declares the section ``data`` of a recipe: the volumes, their splits, and how they are read.

`KeysSection` says where in files volumes and targets are, `SyntheticSection` describes volumes
that no file holds, and `Lists` reads ``data.train``, ``data.validation`` and ``data.test``:
paths and lists, as folders and as words.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from hyperslab.errors import DataError, RecipeError, printable, reason
from hyperslab.formats import registry
from hyperslab.formats.files import AccessPolicy, DataMap, table_file
from hyperslab.recipe.instantiate import A_SOURCE, Maker
from hyperslab.recipe.section import OneOf, Section, Seed, TargetSection, UserPath
from hyperslab.util.documents import read_bytes

if TYPE_CHECKING:  # numpy and torch, for which recipes do not wait
    from hyperslab.formats.source import ScanOptions, Source
    from hyperslab.formats.synthetic import SyntheticVolumes


def _as_words(value: object) -> object:
    """Take one word for a list of one."""
    return (value,) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_as_words)]
"""Paths of samples, see `recipe.lists`."""


class KeysSection(Section):
    """Finds volume and targets in a file; by default in its only array with so many dims."""

    volume: Words | None = None  # the path of an array, such as "grid/delta"; several: channels
    targets: Words | None = None  # paths of arrays, or of attributes: "Header@Omega0"
    labels: str | None = None  # the path of an array with the class of every voxel


Repeats = Annotated[int, Field(gt=0, le=10**6)]


class SyntheticSection(Section):
    """Volumes of random counts, made in memory, for measuring; see `SyntheticVolumes`."""

    width: PositiveInt | None = None  # voxels along each side
    extents: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None  # or D, H and W
    channels: PositiveInt = 4  # in each volume
    samples: Annotated[int, Field(gt=0, le=10**7)] = 128  # in all splits
    targets: PositiveInt | None = None  # numbers to predict; None: 4 if there are no classes
    classes: Annotated[int, Field(ge=2, le=256)] | None = None  # of the voxels, if they have any

    def contradictions(self) -> Iterator[str]:
        if (self.width is None) == (self.extents is None):
            yield (
                "data.synthetic needs width=N (voxels along each side) or extents=[D, H, W], one "
                "of them"
            )
        if self.targets is not None and self.classes is not None:
            yield (
                "data.synthetic.targets and data.synthetic.classes do not go together: targets are "
                "for networks that predict numbers, classes for those that segment"
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the shape (C, D, H, W) of a volume."""
        if self.extents is not None:
            return (self.channels, *self.extents)
        assert self.width is not None
        return (self.channels, self.width, self.width, self.width)

    def source(self) -> SyntheticVolumes:
        """Return the volumes."""
        from hyperslab.formats.synthetic import SyntheticVolumes

        targets = 4 if self.targets is None else self.targets
        return SyntheticVolumes(
            self.shape, self.samples, targets=targets, classes=self.classes or 0
        )


LIST_SUFFIX = ".txt"
"""A file that lists samples, one a line, ends so; comments (#) and empty lines say nothing."""

MOST_LIST = 64 << 20  # [B] of a list of samples

_POSITIONS = re.compile(r"\d*:\d*")


@dataclass(frozen=True, slots=True)
class Lists:
    """The words of each split, by its name, and the folder to which they are relative.

    ``path`` is ``data.path``. Without it every word is a path of its own, of a folder or of a
    file, and the data set is what the folders hold.
    """

    path: Path | None
    words: dict[str, tuple[str, ...]]

    def folders(self) -> list[Path]:
        """Return the folders that hold the data, none within another.

        Raises:
            DataError: a path does not exist, or a list cannot be read.
        """
        if self.path is not None:
            return [self.path]
        found = [
            path if _is_folder(path) else path.parent
            for split in self.words
            for path in self._paths(split)
        ]
        kept: list[Path] = []
        for folder in sorted(dict.fromkeys(map(_plain, found)), key=lambda path: len(path.parts)):
            if not any(folder.is_relative_to(other) for other in kept):
                kept.append(folder)
        return [folder for folder in dict.fromkeys(map(_plain, found)) if folder in kept]

    def relative(self, split: str) -> tuple[str, ...]:
        """Return the words of a split, relative to the data set's folder; raises as `folders`."""
        if self.path is not None:
            return tuple(self._written(split, self.path))
        from hyperslab.formats.views import common_parent

        root = common_parent(self.folders())
        return tuple(_below(root, path) for path in self._paths(split))

    def _written(self, split: str, root: Path) -> Iterator[str]:
        """Return words beside ``data.path``; those of list files in their place."""
        for word in self.words.get(split, ()):
            if word.endswith(LIST_SUFFIX):
                file = next((p for p in (root / word, Path(word)) if p.is_file()), root / word)
                yield from (_inside(root, line) for line in read_list(file, split))
            else:
                yield _inside(root, word)

    def _paths(self, split: str) -> Iterator[Path]:
        """Return words that are paths, where there is no ``data.path``."""
        for word in self.words.get(split, ()):
            path = Path(word)
            if word.endswith(LIST_SUFFIX) and not path.is_dir():
                found = [path.parent / line for line in read_list(path, split)]
            elif set("*?[") & set(word) and not path.exists():
                found = [Path(name) for name in sorted(glob.glob(word, recursive=True))] or [path]
            else:
                found = [path]
            for one in found:
                if not one.exists():
                    raise DataError(
                        f"data.{split}: {printable(str(one))} does not exist\n    without "
                        "data.path give folders, files of samples, or a list of them (*.txt)"
                    )
                yield one


def read_list(path: Path, split: str) -> list[str]:
    """Read the lines of a file that lists samples (`DataError`)."""
    try:
        text = read_bytes(path, MOST_LIST).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.{split}: the list {path} cannot be read: {reason(error)}\n    give a text file "
            "with one sample a line, relative to data.path, or without that to the file's folder"
        ) from error
    lines = map(str.strip, text.splitlines())
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise DataError(f"data.{split}: the list {path} has no line that names a sample")
    return found


def absolute(words: Sequence[str], path: Path | None) -> list[str]:
    """Return these words for another working folder; those that are relative to ``path`` stay."""
    if path is None:
        return [os.path.abspath(word) for word in words]
    return [
        os.path.abspath(word)
        if word.endswith(LIST_SUFFIX) and not (path / word).is_file() and Path(word).is_file()
        else word
        for word in words
    ]


def _inside(root: Path, word: str) -> str:
    """Return a word beside ``data.path``, relative to it."""
    if _POSITIONS.fullmatch(word):
        return word
    return _below(root, root / word) if word.startswith("/") else os.path.normpath(word)


def _below(root: Path, path: Path) -> str:
    relative = Path(os.path.relpath(os.path.abspath(path), os.path.abspath(root))).as_posix()
    if relative == ".." or relative.startswith("../"):
        raise RecipeError(
            f"{path} is not in data.path {root}: leave data.path out, or correct the path"
        )
    return relative


def _is_folder(path: Path) -> bool:
    """Check whether samples lie in it; those of Zarr are folders themselves."""
    suffixes = tuple(suffix for _, suffix in registry.suffixes_of_formats())
    return path.is_dir() and not path.name.endswith(suffixes)


def _plain(path: Path) -> Path:
    return Path(os.path.abspath(path))


def _registered(format: str, info: ValidationInfo) -> str:
    if format not in registry.names() and not (info.data.get("plugins") and _waits(info)):
        raise ValueError("it is not a registered format")
    return format


FormatName = Annotated[str, AfterValidator(_registered), OneOf(registry.names)]


def _waits(info: ValidationInfo) -> bool:
    """Say whether plug-ins wait until the data are opened: those that a run's folder names."""
    return info.context is None or not info.context["trust"].own


LISTS = ("train", "validation", "test")


class DataSection(TargetSection):
    """The volumes and how they are read; a ``target`` is a class derived from `Source`."""

    path: UserPath | None = None  # a folder; without it train, validation and test name folders
    synthetic: SyntheticSection | None = None  # volumes made in memory, in place of files
    python_class: str | None = None  # the class of a source that a program has passed
    batch_size: PositiveInt  # samples over all ranks
    redshifts: tuple[NonNegativeFloat, ...] | None = None  # those of channels to read; None: all
    targets: tuple[str, ...] | None = None  # the parameters to learn, by name; None: all
    subvolume: PositiveInt | None = None  # cut every cube into cubes of this width
    # C, D, H, W of a volume, for plans made without the data, and for the placement of ranks on
    # nodes, which is chosen before data are opened
    shape: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt] | None = None
    multiple: PositiveInt | None = None  # round extents up to multiples, with background
    plugins: tuple[str, ...] = ()  # modules to import, which register formats
    format: FormatName | None = None  # None: recognised
    channels: Literal["first", "last"] | None = None  # None: recognised
    # a pattern of files with volumes, such as "*/df_m_128_z=0.npy"; several: each is a channel
    files: Words | None = None
    keys: KeysSection = KeysSection()  # paths of arrays in HDF5, Zarr and .npz files
    table: UserPath | None = None  # a text or .npy file with a row of targets for each sample
    columns: tuple[str, ...] | None = None  # the names of its columns, or of keys.targets
    classes: tuple[str, ...] | None = None  # names of the classes of keys.labels, background first
    # values of targets (keys, tables) that become -1 and 1; by default the least and the greatest
    ranges: dict[str, tuple[float, float]] | None = None
    # auto: log1p of counts, none of scans; mean: x / mean(x); log1p_mean: log1p of that
    transform: Literal["auto", "log1p", "mean", "log1p_mean"] | None = "auto"
    window: tuple[float, float] | None = None  # [HU], becomes [0, 1]; takes the transform's place
    augment: bool = False  # flips, and axis permutations where voxels have no classes
    # a folder, a file, a pattern, a list *.txt, places 0:800, or several of these; relative to
    # data.path, if that is given
    train: Words | None = None
    validation: Words | None = None  # as train
    test: Words | None = None  # as train
    fold: NonNegativeInt | None = None  # the fold that validates; the others train
    folds: PositiveInt | None = None  # the number of folds
    # the shares of volumes to train, validate and test on
    fractions: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = (0.8, 0.1, 0.1)
    splits: Literal["drawn", "folders"] = "drawn"  # or sub-folders train, validation, test
    # volumes to train, validate and test on, in place of fractions; train null: the rest
    counts: tuple[NonNegativeInt | None, NonNegativeInt, NonNegativeInt] | None = None
    repeat: Repeats = 1  # how often an epoch shows every sample to train on
    seed: Seed = 0  # for the split and the order
    driver: Literal["mpio"] | None = None  # read HDF5 together, by MPI-IO
    # whether boxes are kept, see `open`; sample: one rank reads and sends, for comparison
    mode: Literal["direct", "store", "preload", "sample"] = "store"
    budget: ByteSize | None = None  # of a rank's store, such as "8GiB"; None: half of free memory
    staging: UserPath | None = None  # a folder of the node for boxes beyond the budget
    staging_budget: ByteSize | None = None  # of a rank in staging; None: all free space
    outside_files: bool = False  # HDF5 files may take values from files outside of the folder
    missing_chunks: bool = False  # take the fill value for chunks that are not stored
    on_error: Literal["stop", "skip"] = "stop"  # if a sample cannot be read
    prefetch: NonNegativeInt = 2  # mini-batches read ahead
    prefetch_bytes: ByteSize = ByteSize(1 << 30)  # a limit on them for each rank

    @field_validator("plugins")
    @classmethod
    def _import(cls, plugins: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        """Before the format is looked at, which may be theirs."""
        if info.context is not None and not _waits(info):
            info.context["trust"].load_plugins(plugins, "data.plugins")
        return plugins

    @field_validator("fractions")
    @classmethod
    def _whole(cls, fractions: tuple[float, float, float]) -> tuple[float, float, float]:
        if not math.isclose(sum(fractions), 1.0, abs_tol=1e-6):
            raise ValueError(f"train, validation and test make {sum(fractions):g}, not 1")
        return fractions

    @field_validator("window")
    @classmethod
    def _rising(cls, window: tuple[float, float] | None) -> tuple[float, float] | None:
        if window is not None and not window[0] < window[1]:
            raise ValueError("it should be two numbers, the lower first")
        return window

    @field_validator("redshifts", "targets")
    @classmethod
    def _some(cls, chosen: tuple[object, ...] | None) -> tuple[object, ...] | None:
        if chosen is not None and not chosen:
            raise ValueError("give at least one, or null for all")
        return chosen

    @field_validator(*LISTS)
    @classmethod
    def _words(cls, words: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if words is not None and not words:
            raise ValueError("give a path or a list of samples, or null")
        for word in words or ():
            if not word.strip() or "\0" in word:
                raise ValueError(f"{printable(word)!r} is not a path")
        return None if words is None else tuple(map(os.path.expanduser, words))

    def contradictions(self) -> Iterator[str]:
        """Find keys that do not go together: splits, values, files and keys, the origin."""
        if (self.fold is None) != (self.folds is None):
            yield "data.fold and data.folds go together, such as fold: 0 and folds: 5"
        if self.fold is not None and self.folds is not None and self.fold >= max(2, self.folds):
            yield (
                f"data.fold={self.fold} of data.folds={self.folds}: folds are 2 or more and "
                "counted from 0"
            )
        trains = [key for key in ("train", "validation") if getattr(self, key) is not None]
        if self.folds is not None and trains:
            yield f"data.folds and data.{trains[0]} both choose the training samples"
        if self.folds is None and self.listed and len(trains) < 2:
            missing = "validation" if trains == ["train"] else "train"
            yield f"data.{missing} is missing: data.{self.listed[0]} is given as a list"
        fields = type(self).model_fields
        ways = [
            k for k in ("counts", "splits", "fractions") if getattr(self, k) != fields[k].default
        ]
        if ways and (self.listed or self.folds is not None):
            yield f"data.{[*self.listed, 'folds'][0]} and data.{ways[0]} are two ways to split"
        if self.window is not None and self.transform not in ("auto", None):
            yield "data.window and data.transform are two transforms; give one of them"
        if self.multiple is not None and self.divides_by_mean:
            yield f"data.multiple changes the mean by which data.transform={self.transform} divides"
        if self.synthetic is not None and any(
            extent % (self.subvolume or 1) for extent in self.synthetic.shape[1:]
        ):
            yield f"data.subvolume={self.subvolume} does not divide the extents of data.synthetic"
        if self.mode == "direct" and (self.budget is not None or self.staging is not None):
            yield "data.budget and data.staging belong to the store, but data.mode=direct"
        if self.mapping is not None and self.format is not None:
            yield (
                f"data.format={self.format} has keys and targets of its own: leave it out, or "
                "data.files, data.keys, data.table, data.columns and data.ranges"
            )
        of_files = self.path is not None or (bool(self.listed) and not self._made)
        count = of_files + (self.synthetic is not None) + bool(self._made)
        if count != 1:
            found = "both are; make one of them null" if count else "neither is given"
            yield (
                "data.path (a folder of volumes) or data.synthetic (volumes made in memory) is "
                f"needed, and {found}"
                + ("" if self.target is None else "; data.target takes the place of both")
            )
        keys = ["format", "channels", "driver", "redshifts", "outside_files", "missing_chunks"]
        keys += ["files", "table", "columns", "ranges", "classes"]
        named = [key for key in keys if getattr(self, key)]
        if self.splits == "folders":
            named.append("splits=folders")
        if not of_files and named:
            other = "data.target" if self._made else "data.synthetic"
            yield f"data.{named[0]} describes files, but {other} reads none"

    @property
    def divides_by_mean(self) -> bool:
        """Tell whether the transform needs the mean of a whole volume."""
        return self.transform in ("mean", "log1p_mean")

    @property
    def _made(self) -> str | None:
        """Return the class of anybody's own source."""
        return self.target or self.python_class

    @property
    def mapping(self) -> DataMap | None:
        """Return the map of where volumes and targets are; None where the keys say nothing.

        Raises:
            DataError: targets are in two places, a range is none, or files and keys are both
                several.
        """
        keys = self.keys
        others = (self.table, self.columns, self.ranges, self.classes)
        if not any((self.files, keys.volume, keys.targets, keys.labels, *others)):
            return None
        patterns = self.files or ()
        paths = keys.volume or ()
        if len(patterns) > 1 and len(paths) > 1:
            raise DataError(
                "data.files and data.keys.volume are both lists: only one can make channels"
            )
        return DataMap(
            files=patterns[0] if len(patterns) == 1 else "",
            volume=paths[0] if len(paths) == 1 else "",
            targets=keys.targets or (),
            table=self.table,
            columns=self.columns or (),
            ranges=self.ranges or {},
            labels=keys.labels or "",
            classes=self.classes or (),
            fields=patterns if len(patterns) > 1 else paths if len(paths) > 1 else (),
            of_files=len(patterns) > 1,
        )

    @property
    def allowed(self) -> AccessPolicy:
        return AccessPolicy(self.outside_files, self.missing_chunks)

    @property
    def listed(self) -> list[str]:
        """Return the splits that are given as paths or lists."""
        return [key for key in LISTS if getattr(self, key) is not None]

    @property
    def lists(self) -> Lists:
        return Lists(self.path, {key: getattr(self, key) for key in self.listed})

    @property
    def origin(self) -> Path | list[Path] | Source:
        """Return the folder or folders, or other volumes' source: what `hyperslab.open` takes.

        Imports the plug-ins.

        Raises:
            DataError: a path of a list does not exist.
            RecipeError: the target is no source, or does not take its arguments; or this code must
                not be imported, see `Trust`.
        """
        self.trust.load_plugins(self.plugins, "data.plugins")
        if self.synthetic is not None:
            return self.synthetic.source()
        if self.python_class is not None:
            raise RecipeError(
                f"the data came from a program, a source {self.python_class}\n"
                "    pass it: hs.TrainedRun(run, data=...), or hs.fit(..., resume=True)"
            )
        if self.target is not None:
            source: Source = Maker("data", A_SOURCE)(self)
            return source
        return self.lists.folders() if self.path is None else self.path

    @property
    def scan_options(self) -> ScanOptions:
        """Return what is said of folders before they are scanned."""
        from hyperslab.formats.source import ScanOptions

        return ScanOptions(self.channels, self.format, allowed=self.allowed, mapping=self.mapping)

    def whole_volumes(self) -> Source:
        """Look at the volumes, of which nothing is chosen, without torch and in this process alone.

        Raises:
            DataError, RecipeError: as `origin`, or a file is not what it should be.
        """
        from hyperslab.formats.source import Source

        origin = self.origin
        if isinstance(origin, Source):
            return origin
        folders = [origin] if isinstance(origin, Path) else origin
        return registry.sources_here(folders, self.scan_options)

    def chosen_volumes(self) -> Source:
        """Look at the samples that the keys choose; raises as `whole_volumes` and `selected`."""
        from hyperslab.formats.views import selected

        whole = self.whole_volumes()
        return selected(whole, self.redshifts, self.targets, self.subvolume, self.multiple)

    def absolute_paths(self) -> dict[str, object]:
        """Return the keys whose paths depend on the working folder, as they are from any other."""
        found: dict[str, object] = {}
        if self.path is not None:
            found["path"] = str(self.path.absolute())
        if self.table is not None and not (self.path and (self.path / self.table).is_file()):
            found["table"] = str(self.table.absolute())
        for key in self.listed:
            found[key] = absolute(getattr(self, key), self.path)
        return found

    def check_path(self) -> None:
        """Refuse a folder or table that is not there, or files that are no data by their names.

        Files of plug-ins are not known, as these may have to wait until the data are opened.

        Raises:
            DataError: as `registry.check_source` and `table_file`.
        """
        if self.path is not None and not self._made and not self.plugins:
            mapped = registry.MAPPED if self.mapping else self.format
            registry.check_source(self.path, mapped)
            if self.table is not None:
                table_file(self.path, self.table)

    @property
    def is_here(self) -> bool:
        """Say whether there is something to open."""
        if self.synthetic is not None or self._made:
            return True
        if self.path is not None:
            return self.path.exists()
        return all(Path(word).exists() for words in self.lists.words.values() for word in words)

    @property
    def where(self) -> str:
        """Return the words by which an error names the volumes."""
        if self._made:
            return f"data.target {self._made}"
        if self.synthetic is not None:
            return "data.synthetic"
        return f"data.train {self.train}" if self.path is None else f"data.path {self.path}"
