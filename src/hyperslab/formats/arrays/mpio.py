"""Reads boxes of HDF5 files by MPI-IO: the ranks of a replica open a file and read together.

It is imported with torch, when ``driver="mpio"`` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np

from hyperslab.comm import Grid, per_grid
from hyperslab.comm.agreement import collective_try
from hyperslab.comm.bootstrap import launched_as
from hyperslab.errors import HyperslabError
from hyperslab.formats import optional
from hyperslab.formats.arrays.open import ArrayReader, Catalog, StoredArray
from hyperslab.formats.files import check_unchanged
from hyperslab.formats.source import Array
from hyperslab.geometry import Box

T = TypeVar("T")


class MpioReader(ArrayReader):
    """Reads boxes of HDF5 files collectively, on the communicator of this rank's replica.

    No file stays open, for to close one is collective too, and a rank that has left after an error
    of its own, such as NaN in its box, does not take part any more.
    """

    collective = True

    def __init__(self, communicator: Any) -> None:
        super().__init__()
        self.communicator = communicator

    def read(self, catalog: Catalog, sample: int, array: StoredArray, box: Box) -> Array:
        """Reads one box of the replica's ranks together.

        Distribution scheme: 1. the ranks of the replica agree that each sees the file as it was;
        2. they open it and agree that it holds what it should; 3. one collective transfer; 4. they
        close it; 5. they agree that all went well, and that the file is still as it was.
        """
        path = catalog.path(sample)
        then = catalog.scanned(sample, array)
        self._all_or_raise(lambda: check_unchanged(*then), path)

        def transfer() -> Array:
            with ExitStack() as opened, catalog.as_scanned(sample, array):

                def dataset() -> Any:
                    file = h5py.File(path, "r", driver="mpio", comm=self.communicator)
                    return array.of(path, opened.enter_context(file))

                return self._fetch(self._all_or_raise(dataset, path), box)

        return self._all_or_raise(transfer, path)

    def _fetch(self, dataset: Any, box: Box) -> Array:
        values = np.empty(box.shape, dataset.dtype.newbyteorder("="))
        with dataset.collective:
            dataset.read_direct(values, source_sel=box.slices())
        return values

    def _all_or_raise(self, attempt: Callable[[], T], path: Path) -> T:
        """Returns what ``attempt`` does, if it succeeds on all ranks of the replica."""
        gather = self.communicator.allgather
        return collective_try(attempt, failing=f"{path}: cannot be read", gather=gather)


@per_grid
def replica_of(grid: Grid) -> Any:
    """Splits off the MPI communicator of the ranks that share their samples; all ranks call it.

    Raises:
        HyperslabError: mpi4py is missing, h5py is built without MPI, or the ranks of the grid are
            not those of MPI.
    """
    mpi = optional.mpi()
    if not h5py.get_config().mpi:
        raise HyperslabError(
            'driver="mpio" needs an h5py that was built for a parallel HDF5, and this one was not\n'
            "    HDF5_MPI=ON CC=mpicc pip install --no-binary=h5py h5py, or leave the driver out: "
            "every rank then reads by itself"
        )
    world = mpi.COMM_WORLD
    ours = (launched_as(grid.rank), grid.size)
    theirs = (world.Get_rank(), world.Get_size())
    if not all(world.allgather(ours == theirs)):
        raise HyperslabError(
            f'driver="mpio" needs MPI and torch to number the ranks alike: here, torch\'s rank '
            f"{ours[0]} of {ours[1]} is MPI's {theirs[0]} of {theirs[1]}\n    start the ranks with "
            f"mpirun -n {grid.size}, and leave RANK and WORLD_SIZE to it"
        )
    return world.Split(color=grid.coords["data"], key=grid.rank)
