"""A folder of universes: what is missing is made, what is there is checked and kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hyperslab.errors import DataError
from hyperslab.formats.shared.filled_folder import filling
from hyperslab.universe import universe_file
from hyperslab.universe.nbody import REDSHIFTS, Nbody
from hyperslab.universe.parameters import FIDUCIAL_H_0, NAMES, check_names, draw_universe
from hyperslab.universe.ranges import parameters_in, words_of_ranges

VOXEL = 2.0
"""The default side of a voxel [Mpc/h]: where small universes tell most about sigma_8."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What all universes of a folder share.

    ``size`` voxels and ``particles`` per side; ``box_size`` [Mpc/h] at H_0 = 70; ``parameters``,
    the names of those that vary, within ``ranges``, see `parameters_in`; ``steps`` of the particle
    mesh.

    Raises:
        DataError: if one is out of range, or a parameter's name unknown.
    """

    size: int
    box_size: float
    seed: int
    parameters: tuple[str, ...]
    particles: int
    steps: int
    ranges: str = "wide"

    def __post_init__(self) -> None:
        _at_least("size", self.size, 1)
        _at_least("seed", self.seed, 0)
        _at_least("particles", self.particles, 2)
        _at_least("steps", self.steps, 1)
        if not (math.isfinite(self.box_size) and self.box_size > 0):
            raise DataError(f"box size must be a length in Mpc/h, not {self.box_size}")
        object.__setattr__(self, "parameters", check_names(self.parameters))
        parameters_in(self.ranges)

    def side(self, h_0: float) -> float:
        """The side [Mpc/h] of a universe: all have the same in Mpc, so it grows with H_0."""
        return self.box_size * h_0 / FIDUCIAL_H_0

    def attributes(self, index: int) -> universe_file.Attributes:
        """What universe ``index`` is made from, all of it: kept in its file."""
        words = {
            "parameters": ",".join(self.parameters),
            "ranges": words_of_ranges(parameters_in(self.ranges)),
        }
        return {**asdict(self), **words, "index": index}


def simulate(
    folder: str | Path,
    *,
    count: int,
    size: int,
    box_size: float | None = None,
    seed: int = 0,
    parameters: Sequence[str] = NAMES,
    particles: int | None = None,
    steps: int = 10,
    ranges: str = "wide",
    done: Callable[[Path], None] = lambda path: None,
) -> list[Path]:
    """Make universes 0 .. count-1 in ``folder`` and return all their paths.

    Those that are there already are kept; ``done`` is called for each, kept ones first. The
    arguments are those of :class:`Settings`; a voxel is VOXEL wide and there are as many particles
    as voxels if not said otherwise.

    Raises:
        DataError: if an argument is out of range, if another simulation fills the folder, or if a
            file in it is not the universe it would be, or cannot be written.
        HyperslabError: if the extra ``universe`` is not installed.
    """
    _at_least("count", count, 1)
    _at_least("size", size, 1)
    settings = Settings(
        size=size,
        box_size=VOXEL * size if box_size is None else float(box_size),
        seed=seed,
        parameters=tuple(parameters),
        particles=size if particles is None else particles,
        steps=steps,
        ranges=ranges,
    )
    made = _made(Path(folder))
    with filling(made, "simulation"):
        return _fill(made, settings, count, done)


def _fill(folder: Path, settings: Settings, count: int, done: Callable[[Path], None]) -> list[Path]:
    """Check all that is there before anything is computed, then make the rest."""
    paths = [universe_file.path_of(folder, index) for index in range(count)]
    kept = [index for index, path in enumerate(paths) if path.exists()]
    for index in kept:
        universe_file.check_universe(paths[index], settings.attributes(index))
        done(paths[index])
    if len(kept) == count:
        return paths
    nbody = Nbody(size=settings.size, particles=settings.particles, steps=settings.steps)
    for index in sorted(set(range(count)) - set(kept)):
        _make(paths[index], settings, index, nbody)
        done(paths[index])
    return paths


def _make(path: Path, settings: Settings, index: int, nbody: Nbody) -> None:
    ranges = parameters_in(settings.ranges)
    drawn = draw_universe(settings.seed, index, settings.parameters, ranges)
    h_0 = float(drawn.physical[NAMES.index("H_0")])
    counts = nbody(drawn.physical, settings.side(h_0), drawn.noise)
    attributes = settings.attributes(index)
    universe_file.write_universe(
        path, universe_file.as_int16(counts, index), drawn, REDSHIFTS, attributes
    )


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder {folder}: {error.strerror}") from error
    return folder


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise DataError(f"{name} must be at least {least}, not {value}")
