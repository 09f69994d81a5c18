"""One universe in one HDF5 file of the public layout; a final name means a finished file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from hyperslab.atomic_files import write_bytes
from hyperslab.errors import DataError
from hyperslab.formats.keyed.hdf5_writer import SUMMED, put_summed, read_summed
from hyperslab.formats.shared.chunking import chunk_side
from hyperslab.universe.parameters import NAMES, PARAMETERS, Draw
from hyperslab.universe.ranges import words_of_ranges

Attributes = Mapping[str, int | float | str]


def path_of(folder: Path, index: int) -> Path:
    return folder / f"univ_ics_{index:06d}.hdf5"


def as_int16(counts: NDArray[np.int32], index: int) -> NDArray[np.int16]:
    """The counts in the storage type.

    Raises:
        DataError: if one does not fit, which would otherwise wrap around silently.
    """
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
) -> None:
    """Write ``full`` (S, S, S, 4) and the parameters, under a temporary name until complete.

    Raises:
        DataError: if the folder cannot be written or the disk is full.
    """
    image = _image(counts, draw, redshifts, attributes)
    try:
        write_bytes(path, image)
        path.with_name(f"{path.name}.partial").unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error


def check_universe(path: Path, attributes: Attributes) -> None:
    """Nothing, if ``path`` is the universe that these attributes describe.

    Raises:
        DataError: if it is another one, or no readable universe at all.
    """
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


def _image(
    counts: NDArray[np.int16], draw: Draw, redshifts: tuple[float, ...], attributes: Attributes
) -> bytes:
    """The file's bytes, made in memory: what fails later is one plain write."""
    side = chunk_side(counts.shape[0])
    chunks = (side, side, side, counts.shape[3])
    with h5py.File("image", "w", driver="core", backing_store=False, libver=SUMMED) as file:
        file.create_dataset("full", data=counts, chunks=chunks, fletcher32=True)
        put_summed(file, "unitPar", draw.unit)
        put_summed(file, "physPar", draw.physical)
        put_summed(file, "namePar", np.array(NAMES, dtype="S"))
        put_summed(file, "redshifts", np.array(redshifts))
        file.attrs.update(attributes)
        file.flush()
        image: bytes = file.id.get_file_image()
    return image
