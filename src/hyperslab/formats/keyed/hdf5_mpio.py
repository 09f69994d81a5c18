"""HDF5 files read collectively, by MPI-IO (the extra `mpi`, with h5py built for a parallel HDF5).

The ranks of a replica open a file together and each reads its box of it in one collective transfer,
which the MPI library may put together to few large requests. Nothing is read in the background:
collective calls need one order on all ranks, and HDF5 lets one thread in at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np

from hyperslab.comm import Grid, per_grid
from hyperslab.comm.agreement import all_or_raise
from hyperslab.errors import DataError, HyperslabError
from hyperslab.formats.keyed.opener import KeyedOpener, Selection, StoredArray
from hyperslab.formats.shared import optional
from hyperslab.formats.shared.fingerprint import check_unchanged
from hyperslab.formats.source import Array

T = TypeVar("T")


class MpioOpener(KeyedOpener):
    """Opens HDF5 files on the communicator of this rank's replica.

    No file stays open, for to close one is collective too, and a rank that has left after an error
    of its own, such as NaN in its box, does not take part any more.
    """

    collective = True

    def __init__(self, communicator: Any) -> None:
        self.communicator = communicator

    def read(self, array: StoredArray, selection: Selection) -> Array:
        """What is selected of an array.

        Distribution scheme: 1. the ranks of the replica agree that each sees the file as it was;
        2. they open it and agree that it holds what it should; 3. one collective transfer; 4. they
        close it; 5. they agree that all went well, and that the file is still as it was.
        """
        path = array.path
        self._all_or_raise(lambda: check_unchanged(array.stamped, array.sample, array.stamp), path)

        def transfer() -> Array:
            with ExitStack() as opened, array.as_scanned():

                def dataset() -> Any:
                    file = h5py.File(path, "r", driver="mpio", comm=self.communicator)
                    return array.of(opened.enter_context(file))

                stored = self._all_or_raise(dataset, path)
                return self._fetch(stored, selection, np.dtype(array.dtype))

        return self._all_or_raise(transfer, path)

    def _fetch(self, dataset: Any, selection: Selection, dtype: np.dtype[Any]) -> Array:
        values = np.empty([s.stop - s.start for s in selection], dtype)
        with dataset.collective:
            dataset.read_direct(values, source_sel=selection)
        return values

    def _all_or_raise(self, attempt: Callable[[], T], path: Path) -> T:
        """What ``attempt`` returns, if it succeeds on all ranks of the replica.

        Raises:
            DataError: on all of them; see `all_or_raise`.
        """
        failing = f"{path}: cannot be read"
        gather = self.communicator.allgather
        return all_or_raise(attempt, failing=failing, error=DataError, gather=gather)


@per_grid
def replica_of(grid: Grid) -> Any:
    """The MPI communicator of the ranks that share their samples with this one; all ranks call it.

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
    ours = (grid.rank, grid.size)
    theirs = (world.Get_rank(), world.Get_size())
    if not all(world.allgather(ours == theirs)):
        raise HyperslabError(
            f'driver="mpio" needs MPI and torch to number the ranks alike: here, torch\'s rank '
            f"{ours[0]} of {ours[1]} is MPI's {theirs[0]} of {theirs[1]}\n    start the ranks with "
            f"mpirun -n {grid.size}, and leave RANK and WORLD_SIZE to it"
        )
    return world.Split(color=grid.coords["data"], key=grid.rank)
