"""HDF5 files read collectively, by MPI-IO (the extra `mpi`, with h5py built for a parallel HDF5).

The ranks of a replica open a file together and each reads its box of it in one collective transfer,
which the MPI library may put together to few large requests. Nothing is read in the background:
collective calls need one order on all ranks, and HDF5 lets one thread in at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np

from hyperslab.comm import Grid
from hyperslab.data import library
from hyperslab.data.catalog import Catalog
from hyperslab.data.hdf5 import Hdf5Folder
from hyperslab.data.keyed import KeyedFolder, Selection
from hyperslab.data.source import Array
from hyperslab.errors import DataError, HyperslabError


class MpioFolder(Hdf5Folder):
    """The HDF5 files of a catalogue, opened on the communicator of this rank's replica.

    No file stays open, for to close one is collective too, and a rank that fails could not.
    """

    collective = True

    def __init__(self, catalog: Catalog, communicator: Any) -> None:
        super().__init__(catalog)
        self.communicator = communicator

    def _load(self, sample: int, *what: Any) -> Array:
        """What is selected of a data set.

        Distribution scheme: 1. all ranks of the replica agree that each can reach the file; 2. they
        open it and agree that it is as it was; 3. one collective transfer; 4. they close it; 5.
        they agree that all went well.
        """
        path = Path(self.where(sample))
        self._agree(sample, path.stat)

        def read() -> Array:
            try:
                return KeyedFolder._load(self, sample, *what)
            finally:
                self.close()

        return cast(Array, self._agree(sample, read))

    def _dataset(self, sample: int, key: str, shape: tuple[int, ...], dtype: str) -> Any:
        return self._agree(sample, lambda: KeyedFolder._dataset(self, sample, key, shape, dtype))

    def _fetch(self, dataset: Any, selection: Selection, dtype: np.dtype[Any]) -> Array:
        with dataset.collective:
            return super()._fetch(dataset, selection, dtype)

    def _file(self, name: str) -> h5py.File:
        path = self.catalog.folder / name
        self._open[name] = h5py.File(path, "r", driver="mpio", comm=self.communicator)
        return self._open[name]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _agree(self, sample: int, attempt: Callable[[], Any]) -> Any:
        """What ``attempt`` returns, if it succeeds on all ranks of the replica.

        Raises:
            DataError: on all of them, with the words of the first that failed.
        """
        result, failed = None, ""
        try:
            result = attempt()
        except (OSError, RuntimeError, KeyError, ValueError, DataError) as error:
            failed = str(error) or type(error).__name__
        said = self.communicator.allgather(failed)
        words = next((words for words in said if words), "")
        if not words:
            return result
        where = self.where(sample)
        raise DataError(words if words.startswith(where) else f"{where}: {words}")


def replica_of(grid: Grid) -> Any:
    """The MPI communicator of the ranks that share their samples with this one; all ranks call it.

    Raises:
        HyperslabError: mpi4py is missing, h5py is built without MPI, or the ranks of the grid are
            not those of MPI.
    """
    mpi = library.mpi()
    if not h5py.get_config().mpi:
        raise HyperslabError(
            'driver="mpio" needs an h5py that was built for a parallel HDF5, and this one was not\n'
            "    HDF5_MPI=ON CC=mpicc pip install --no-binary=h5py h5py, or leave the driver out: "
            "every rank then reads by itself"
        )
    world = mpi.COMM_WORLD
    if (world.Get_size(), world.Get_rank()) != (grid.size, grid.rank):
        raise HyperslabError(
            f'driver="mpio": this is rank {grid.rank} of {grid.size} but {world.Get_rank()} of '
            f"{world.Get_size()} for MPI\n    start the ranks with mpirun -n {grid.size}"
        )
    return world.Split(color=grid.coords["data"], key=grid.rank)
