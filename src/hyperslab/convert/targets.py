"""The formats that are written, and which of them can hold what."""

from __future__ import annotations

from collections.abc import Mapping

from hyperslab.errors import DataError
from hyperslab.formats.keyed.hdf5_writer import Hdf5Target, LbannTarget
from hyperslab.formats.keyed.zarr_writer import ZarrTarget
from hyperslab.formats.nifti.writer import NiftiTarget
from hyperslab.formats.npy.writer import NpyTarget
from hyperslab.formats.registry import Format
from hyperslab.formats.source import Source
from hyperslab.formats.tfrecord.writer import TfRecordTarget
from hyperslab.formats.writer import Target

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
