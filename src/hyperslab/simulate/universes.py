"""Fills a folder with simulated universes: what is missing is made, what is there is checked.

Each is one HDF5 file of the public layout; a final name means a finished file. What is there is
looked at before torch is imported, which simulates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from hyperslab.errors import DataError
from hyperslab.formats.arrays.writer import check_small_file
from hyperslab.formats.files import lock_folder
from hyperslab.simulate.parameters import (
    NAMES,
    PARAMETERS,
    Attributes,
    UniverseSettings,
    settings_of,
    words_of_ranges,
)
from hyperslab.util.worker_pool import map_tasks


def universe_path(folder: Path, index: int) -> Path:
    return folder / f"univ_ics_{index:06d}.hdf5"


def check_universe(path: Path, attributes: Attributes) -> None:
    """Refuses ``path`` if it is not the universe that these attributes describe."""
    remedy = "delete it or simulate into another folder"
    (shape,), found = check_small_file(path, ["full"], "a simulated universe", remedy)
    found.setdefault("ranges", words_of_ranges(PARAMETERS))  # files did not always say them
    for name, wanted in attributes.items():
        if name not in found or not np.array_equal(found[name], wanted):
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
    of the part, kept ones first. The arguments are those of `UniverseSettings`; a voxel is
    VOXEL_SIDE wide and there are as many particles as voxels if not said otherwise.

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
    import torch

    from hyperslab.simulate.one_universe import make_universe

    alone = len(tasks) * settings.particles**3 < WORTH_WORKERS
    with closing(map_tasks(make_universe, tasks, 1 if alone else torch.get_num_threads())) as made:
        for path in made:
            done(path)
    return [*paths.values()]


WORTH_WORKERS = 2**22
"""Gives the particles of all universes from which on other processes pay: they import torch."""
