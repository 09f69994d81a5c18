"""One universe of a run's data set, read only where it is shown."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from hyperslab.errors import DataError
from hyperslab.geometry import Window
from hyperslab.models.variants import variant_of
from hyperslab.report.run import Run
from hyperslab.report.slices import AXES, Planes


def middle_planes(run: Run) -> Planes:
    """The three middle planes of the first universe, first channel, as log(1 + count).

    Raises:
        DataError: the folder of universes is not there, or holds none.
    """
    folder = Path(str(run.setting("data.path")))
    file = next(iter(sorted(folder.rglob("*.hdf5"))), None)
    if file is None:
        raise DataError(f"{folder} holds no universe any more")
    with h5py.File(file) as f:
        full = f["full"]
        shape = full.shape[:3]
        values = {}
        for i, axis in enumerate(AXES):
            index = [slice(None)] * 3
            index[i] = shape[i] // 2
            values[axis] = np.log1p(full[(*index, 0)].astype(np.float64))
    return Planes(file.name, shape, values)


def first_window(run: Run, shape: tuple[int, int, int]) -> Window | None:
    """What the first convolution reads; None for a network that is not one of ours."""
    try:
        first = variant_of(str(run.setting("model.variant")), shape[0]).convolutions[0]
    except ValueError:
        return None
    return Window(first.kernel, stride=first.stride, before=first.padding, after=first.padding)
