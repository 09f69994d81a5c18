"""Fills a folder with simulated universes: what is missing is made, what is there is checked.

Each is one HDF5 file of the public layout; a final name means a finished file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

from hyperslab.errors import DataError
from hyperslab.formats.arrays.writer import read_summed, write_small_file, write_summed
from hyperslab.formats.files import lock_folder
from hyperslab.formats.storage import default_chunk_side
from hyperslab.simulate.nbody import REDSHIFTS, Nbody
from hyperslab.simulate.parameters import (
    NAMES,
    PARAMETERS,
    Attributes,
    Draw,
    UniverseSettings,
    draw_universe,
    parameters_in,
    settings_of,
    words_of_ranges,
)
from hyperslab.util.worker_pool import map_tasks


def universe_path(folder: Path, index: int) -> Path:
    return folder / f"univ_ics_{index:06d}.hdf5"


def as_int16(counts: NDArray[np.int32], index: int) -> NDArray[np.int16]:
    """Converts the counts to the storage type, or refuses them: they would wrap around."""
    most = int(counts.max())
    limit = np.iinfo(np.int16).max
    if most > limit:
        raise DataError(
            f"universe {index}: a voxel holds {most} particles and int16 ends at {limit};"
            " take fewer particles or more voxels"
        )
    return counts.astype(np.int16)


def write_universe(
    path: Path,
    counts: NDArray[np.int16],
    draw: Draw,
    redshifts: tuple[float, ...],
    attributes: Attributes,
    *,
    concurrent: bool = False,
) -> None:
    """Writes ``full`` (S, S, S, 4) and the parameters, under a temporary name until complete.

    ``concurrent``: other processes may do the same.
    """
    side = default_chunk_side(counts.shape[0])
    chunks = (side, side, side, counts.shape[3])

    def fill(file: h5py.File) -> None:
        file.create_dataset("full", data=counts, chunks=chunks, fletcher32=True)
        write_summed(file, "unitPar", draw.unit)
        write_summed(file, "physPar", draw.physical)
        write_summed(file, "namePar", np.array(NAMES, dtype="S"))
        write_summed(file, "redshifts", np.array(redshifts))
        file.attrs.update(attributes)

    write_small_file(path, fill, concurrent=concurrent)
    path.with_name(f"{path.name}.partial").unlink(missing_ok=True)  # an earlier version's


def check_universe(path: Path, attributes: Attributes) -> None:
    """Refuses ``path`` if it is not the universe that these attributes describe."""
    remedy = "delete it or simulate into another folder"
    try:
        with h5py.File(path, "r") as file:
            found = dict(file.attrs)
            shape = file["full"].shape
            read_summed(file["full"])
    except (OSError, KeyError) as error:
        raise DataError(f"{path} is not a simulated universe ({error}): {remedy}") from error
    found.setdefault("ranges", words_of_ranges(PARAMETERS))  # files did not always say them
    for name, wanted in attributes.items():
        if name not in found or found[name] != wanted:
            raise DataError(
                f"{path} was made with {name} = {found.get(name)}, not {wanted}: {remedy}"
            )
    size = attributes["size"]
    wanted_shape = (size, size, size, 4)
    if shape != wanted_shape:
        raise DataError(f"{path} holds counts of shape {shape}, not {wanted_shape}: {remedy}")


def make_universes(
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
    part: tuple[int, int] = (0, 1),
    done: Callable[[Path], None] = lambda path: None,
) -> list[Path]:
    """Makes universes 0 .. count-1 in ``folder`` and returns their paths.

    Of several processes that fill one folder together each makes its ``part``, (k, n): every n-th
    universe from number k on. Those that are there already are kept; ``done`` is called for each
    of the part, kept ones first. The
    arguments are those of `UniverseSettings`; a voxel is VOXEL wide and there are as many
    particles as voxels if not said otherwise.

    Raises:
        DataError: if an argument is out of range, if another simulation fills the folder, or if a
            file in it is not the universe it would be, or cannot be written.
    """
    settings = settings_of(
        count=count,
        size=size,
        box_size=box_size,
        seed=seed,
        parameters=parameters,
        particles=particles,
        steps=steps,
        ranges=ranges,
    )
    first, parts = part
    indices = range(first, count, parts)
    with lock_folder(Path(folder), "simulation", shared=parts > 1):
        return _fill(Path(folder), settings, indices, done, concurrent=parts > 1)


def _fill(
    folder: Path,
    settings: UniverseSettings,
    indices: range,
    done: Callable[[Path], None],
    *,
    concurrent: bool,
) -> list[Path]:
    """Checks all that is there before anything is computed, then makes the rest."""
    paths = {index: universe_path(folder, index) for index in indices}
    kept = [index for index, path in paths.items() if path.exists()]
    for index in kept:
        check_universe(paths[index], settings.attributes(index))
        done(paths[index])
    if len(kept) == len(paths):
        return [*paths.values()]
    tasks = [(settings, index, paths[index], concurrent) for index in sorted({*paths} - {*kept})]
    alone = len(tasks) * settings.particles**3 < WORTH_WORKERS
    with closing(map_tasks(_make, tasks, 1 if alone else torch.get_num_threads())) as made:
        for path in made:
            done(path)
    return [*paths.values()]


WORTH_WORKERS = 2**22
"""Gives the particles of all universes from which on other processes pay: they import torch."""


def _make(settings: UniverseSettings, index: int, path: Path, concurrent: bool) -> Path:
    """Makes one universe on one thread: so it is the same on any number of them."""
    ranges = parameters_in(settings.ranges)
    drawn = draw_universe(settings.seed, index, settings.parameters, ranges)
    h_0 = float(drawn.physical[NAMES.index("H_0")])
    nbody = _nbody(settings.size, settings.particles, settings.steps)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        counts = as_int16(nbody(drawn.physical, settings.side(h_0), drawn.noise), index)
    finally:
        torch.set_num_threads(threads)
    words = settings.attributes(index)
    write_universe(path, counts, drawn, REDSHIFTS, words, concurrent=concurrent)
    return path


@functools.lru_cache(maxsize=1)
def _nbody(size: int, particles: int, steps: int) -> Nbody:
    return Nbody(size=size, particles=particles, steps=steps)
