"""Simulates one universe and writes its file; processes of a pool do it, each with torch."""

from __future__ import annotations

import functools
from pathlib import Path

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

from hyperslab.errors import DataError
from hyperslab.formats.arrays.writer import write_small_file, write_summed
from hyperslab.formats.storage import default_chunk_side
from hyperslab.simulate import parameters
from hyperslab.simulate.nbody import REDSHIFTS, Nbody


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
    draw: parameters.Draw,
    redshifts: tuple[float, ...],
    attributes: parameters.Attributes,
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
        write_summed(file, "namePar", np.array(parameters.NAMES, dtype="S"))
        write_summed(file, "redshifts", np.array(redshifts))
        file.attrs.update(attributes)

    write_small_file(path, fill, concurrent=concurrent)
    path.with_name(f"{path.name}.partial").unlink(missing_ok=True)  # an earlier version's


def make_universe(
    settings: parameters.UniverseSettings, index: int, path: Path, concurrent: bool
) -> Path:
    """Makes one universe on one thread: so it is the same on any number of them."""
    ranges = parameters.parameters_in(settings.ranges)
    drawn = parameters.draw_universe(settings.seed, index, settings.parameters, ranges)
    h_0 = float(drawn.physical[parameters.NAMES.index("H_0")])
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
