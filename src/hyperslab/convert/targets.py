"""The formats that are written, and which of them can hold what."""

from __future__ import annotations

from collections.abc import Mapping

from hyperslab.convert.hdf5 import Hdf5Target, LbannTarget
from hyperslab.convert.nifti import NiftiTarget
from hyperslab.convert.npy import NpyTarget
from hyperslab.convert.target import Target
from hyperslab.convert.tfrecord import TfRecordTarget
from hyperslab.convert.zarrs import ZarrTarget
from hyperslab.data.formats import Format
from hyperslab.data.source import Source
from hyperslab.errors import DataError

TARGETS: Mapping[Format, Target] = {
    "hdf5": Hdf5Target(),
    "lbann": LbannTarget(),
    "npy": NpyTarget(),
    "tfrecord": TfRecordTarget(),
    "zarr": ZarrTarget(),
    "nifti": NiftiTarget(),
}


def check_fit(format: Format, source: Source) -> None:
    """Nothing, if the format can hold the samples.

    Raises:
        DataError: it cannot; named are the format, what does not fit, and the formats that can.
    """
    misfit = TARGETS[format].misfit(source)
    if misfit:
        others = [name for name, target in TARGETS.items() if not target.misfit(source)]
        raise DataError(
            f"{source.where(0)}: {format} cannot hold {misfit}; {', '.join(others)} can"
        )
