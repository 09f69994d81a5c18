"""Reads NIfTI headers and volumes in one orientation, and writes masks back in the volume's own.

In memory a volume is (D, H, W): D grows from inferior to superior, H from posterior to anterior,
W from left to right (NIfTI's RAS+ axes in the order z, y, x). The axes of the file are permuted
and flipped to the closest ones of these, never rotated: an oblique scan stays oblique, and its
affine says so.

A `NiftiFile` has what a header says, reads boxes, and is what a mask is written like.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError, system_errors_as
from hyperslab.formats import files, optional
from hyperslab.formats.storage_order import StorageOrder
from hyperslab.formats.targets import Floats
from hyperslab.geometry import Box
from hyperslab.util.atomic_files import created_aside

NIFTI = "NIfTI"

NIFTI_SUFFIXES = (".nii", ".nii.gz")

MILLIMETRES = {1: 1e3, 3: 1e-3}
"""Millimetres in the header's unit, which may be metres or microns (nifti1.h, `xyzt_units`)."""

MANY_VOXELS = 1 << 29
"""A gzip file of more voxels is refused where it is packed more than `MANY_RATIO`.

Masks of mostly one class are packed as much as deflate can, and so is what is made to fill memory.
"""

MANY_RATIO = 200

OBLIQUE = 35.0
"""The largest angle [degrees] of an axis to the patient's: gantries tilt by up to 30."""


@dataclass(frozen=True, slots=True)
class NiftiFile:
    """Holds what the header of a file says, with nibabel's ``image``, and reads boxes of voxels."""

    path: Path
    image: Any
    order: StorageOrder  # of the file's dims
    affine: Floats  # (4, 4): (d, h, w, 1) to [mm] in RAS+

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape (C, D, H, W) of the volume."""
        return self.order.volume_shape(self.extents)

    @property
    def extents(self) -> tuple[int, ...]:
        """Returns the extents of the file's dims, (i, j, k) or (i, j, k, c)."""
        return _extents_of(self.image)

    @property
    def itemsize(self) -> int:
        """Returns the size of a stored voxel [B]."""
        return int(self.image.get_data_dtype().itemsize)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Returns int16 where the file's numbers are such and are not scaled, else float32."""
        scaled = (self.image.dataobj.slope, self.image.dataobj.inter) != (1, 0)
        exact = np.can_cast(self.image.get_data_dtype(), np.int16) and not scaled
        return np.dtype(np.int16 if exact else np.float32)

    @property
    def packed(self) -> bool:
        """Tells if the file is gzip, by its name, as nibabel does."""
        return self.path.name.endswith(".gz")

    def read(self, box: Box | None = None) -> NDArray[Any]:
        """Reads a box (C, d, h, w), or all, along the patient's axes, with slope and intercept."""
        with files.naming(self.path, NIFTI, files.ANY):
            whole = Box.whole(self.extents)
            stored = whole if box is None else self.order.to_file(box, self.extents)
            place = stored.slices()
            if self.packed and stored == whole:
                # Only who reads all of it comes to the sum at gzip's end.
                with files.open_gzip_to_end(self.path) as file:
                    values = self._scaled(file, place)
            else:
                self._check_end()
                values = self._scaled(self.image.dataobj.file_like, place)
            return self.order.to_volume(values)

    def _scaled(self, file: Any, place: tuple[slice, ...]) -> NDArray[Any]:
        """Reads a part of the file's array, with slope and intercept.

        They are not left to nibabel, which sets the filters of warnings meanwhile, those of all
        threads: threads that read side by side would put them back wrongly.
        """
        stored = self.image.dataobj
        spec = (self.extents, stored.dtype, stored.offset)
        values = optional.nibabel().arrayproxy.ArrayProxy(file, spec, mmap=False)[place]
        with np.errstate(over="ignore", invalid="ignore"):  # infinite values are refused later
            for operation, number, nothing in (
                (np.multiply, stored.slope, 1),
                (np.add, stored.inter, 0),
            ):
                if number != nothing:
                    values = operation(values, np.array([number], np.float64))
            return np.asarray(values, self.dtype)

    def _check_end(self) -> None:
        """Accepts a file that has all of its voxels, before memory is taken for them."""
        end = int(self.image.dataobj.offset) + math.prod(self.image.shape) * self.itemsize
        found = self.path.stat().st_size
        if not self.packed and found < end:
            raise EOFError(f"it has {found} of {end} bytes")


def open_nifti(path: Path) -> NiftiFile:
    """Reads the header of a file, which may have channels along a fourth dim.

    Raises:
        DataError: it is no NIfTI file or cannot hold what it says, is not 3-D, has no voxels, is
            oblique or does not say how it is oriented.
        HyperslabError: the extra ``medical`` is not installed.
    """
    nibabel = optional.nibabel()
    with files.naming(path, NIFTI, files.ANY):
        _check_claims(path)
        image = nibabel.load(path, mmap=False)
        if not isinstance(image, nibabel.Nifti1Image):
            raise DataError(f"{path}: is not a NIfTI file but a {type(image).__name__}")
        if image.get_data_dtype().kind not in "iuf":
            raise DataError(f"{path}: holds {image.get_data_dtype()} voxels; needs numbers")
        turn = _orientation(path, image)
        dims = "".join("WHD"[int(axis)] for axis, _ in turn)
        flipped = "".join("WHD"[int(axis)] for axis, flip in turn if flip < 0)
        order = StorageOrder(dims + "C" * (len(_extents_of(image)) - 3), flipped)
        unit = MILLIMETRES.get(int(image.header["xyzt_units"]) & 7, 1.0)
        back = nibabel.orientations.inv_ornt_aff(turn, image.shape[:3])
        affine = np.diag([unit, unit, unit, 1.0]) @ image.affine @ back
        return NiftiFile(path, image, order, affine[:, [2, 1, 0, 3]])


def _extents_of(image: Any) -> tuple[int, ...]:
    """Returns the extents of an image's dims, without those of 1 behind the third.

    The fourth is time and the fifth has a vector's components, as ITK writes channels.
    """
    return (*image.shape[:3], *(extent for extent in image.shape[3:] if extent != 1))


def _check_claims(path: Path) -> None:
    """Refuses a header that says more than its file can hold, before nibabel believes it."""
    nibabel = optional.nibabel()
    packed = path.name.endswith(".gz")
    with gzip.open(path) if packed else path.open("rb", buffering=0) as file:
        block = file.read(nibabel.Nifti2Header.sizeof_hdr)
        kinds = (nibabel.Nifti1Header, nibabel.Nifti2Header)
        kind = next((kind for kind in kinds if kind.may_contain_header(block)), None)
        if kind is None:
            return  # of another format, which nibabel names
        header = kind(block[: kind.sizeof_hdr], check=False)
        start = int(header["vox_offset"])
        if start > files.FREE_OF_DOUBT:
            raise DataError(f"{path}: claims a header of {start} bytes, which no NIfTI file has")
        file.seek(kind.sizeof_hdr)
        _check_extensions(file.read(max(0, start - kind.sizeof_hdr)), header.endianness)
    extents = [int(extent) for extent in header.get_data_shape()]
    if any(extent < 0 for extent in extents):
        raise DataError(f"{path}: says that it has {' x '.join(map(str, extents))} voxels")
    size = start + math.prod(extents) * header.get_data_dtype().itemsize
    if packed:
        many = math.prod(extents) > MANY_VOXELS
        files.check_gzip_size(path, size, MANY_RATIO if many else files.DEFLATE_RATIO)
    # What has less may be cut short, which reading tells.
    elif size > path.stat().st_size * files.DEFLATE_RATIO:
        raise DataError(f"{path}: has {path.stat().st_size} bytes and says that it has {size}")


def _check_extensions(block: bytes, endianness: str) -> None:
    """Accepts extensions that end before the voxels; nibabel reads as much as they say."""
    place = 4 if block[:1] > b"\0" else len(block)
    while place + 16 <= len(block):
        size = int(np.frombuffer(block, f"{endianness}i4", 1, place)[0])
        if not 8 <= size <= len(block) - place:
            raise ValueError(f"an extension of its header has {size} bytes")
        place += size


def _orientation(path: Path, image: Any) -> NDArray[Any]:
    """Finds how the file's axes become RAS+, if the file says so, is 3-D and not oblique."""
    extents = " x ".join(map(str, image.shape))
    if len(image.shape) < 3 or len(_extents_of(image)) > 4:
        raise DataError(f"{path}: is {len(image.shape)}-D, {extents}; needs one volume")
    if 0 in image.shape:
        raise DataError(f"{path}: is empty: {extents} voxels")
    if not (image.header["sform_code"] > 0 or image.header["qform_code"] > 0):
        raise DataError(
            f"{path}: does not say where left is (sform_code and qform_code are 0); set one of them"
        )
    sizes = np.linalg.norm(image.affine[:3, :3], axis=0)
    if not (np.isfinite(image.affine).all() and (sizes > 0).all()):
        raise DataError(f"{path}: its affine has no inverse: {image.affine[:3].tolist()}")
    found = optional.nibabel().io_orientation(image.affine)
    if not np.isnan(found).any():
        cosines = np.abs(image.affine[found[:, 0].astype(int), range(3)]) / sizes
        if cosines.min() >= math.cos(math.radians(OBLIQUE)):
            return found
    raise DataError(
        f"{path}: an axis is more than {OBLIQUE:g} degrees from the patient's; resample it first"
    )


def check_lattice(file: NiftiFile, like: NiftiFile) -> None:
    """Refuses a file whose voxels are not as many as those of ``like``, or not where these are.

    The corners may be half a voxel of ``like`` apart.
    """
    shape, wanted = file.shape[1:], like.shape[1:]
    if shape != wanted:
        raise DataError(
            f"{file.path}: has {shape} voxels (D, H, W) but {like.path.name} has {wanted}"
        )
    corners = np.array(list(np.ndindex(2, 2, 2))) * (np.array(shape) - 1)
    indices = np.c_[corners, np.ones(8)].T
    off = float(np.abs(np.linalg.inv(like.affine) @ file.affine @ indices - indices).max())
    if not off <= 0.5:
        raise DataError(
            f"{file.path}: its affine is off by {off:.3g} voxels from {like.path.name}'s"
        )


def check_channels(opened: Sequence[NiftiFile]) -> None:
    """Refuses files that are not the channels of one volume; a single file may have several."""
    first, *others = opened
    for other in others:
        if other.shape != first.shape or other.shape[0] != 1:
            raise DataError(
                f"{other.path}: is {other.shape} (C, D, H, W) but {first.path.name} is "
                f"{first.shape}; each channel has a file, and all have one shape"
            )
        check_lattice(other, first)


FASTEST = 1
"""The level of gzip that nibabel takes."""

CANONICAL = ((0, 1), (1, 1), (2, 1))


Mask = NDArray[np.uint8]

MASK_BLOCK = 8 << 20
"""The most voxels of a mask that are held while it is written; one layer at least."""


def write_mask(path: Path, read: Callable[[Box], Mask], like: NiftiFile) -> None:
    """Writes a mask on the lattice of ``like``, of which ``read`` gives boxes (d, h, w).

    Orientation, shape, affine and the rest of the header are those of the file. Layers are written
    one after the other, so that the mask is never held as a whole. The name appears when the file
    is complete.

    Raises:
        DataError: the name does not end in .nii or .nii.gz, or the file cannot be written.
    """
    header = like.image.header.copy()
    header["cal_min"] = header["cal_max"] = 0  # the window in which a viewer shows the CT
    if len(like.image.shape) > 4:
        header["intent_code"] = 0  # the scan's voxels are vectors
    order = StorageOrder(like.order.dims.replace("C", ""), like.order.flipped.replace("C", ""))
    write_layers(path, read, like.shape[1:], order, None, header)


def write_layers(
    path: Path,
    read: Callable[[Box], Mask],
    extents: Sequence[int],
    order: StorageOrder,
    affine: Floats | None,
    header: Any,
) -> None:
    """Writes the classes of a volume of ``extents`` (D, H, W), stored in the ``order`` (i, j, k).

    ``affine`` and ``header`` as in `save_image`, and raises as that.
    """
    volume = (1, *extents)
    stored = order.stored_shape(volume)
    # Of a mask of equal values, which takes no memory, the library makes the header.
    nothing = np.broadcast_to(np.uint8(0), stored)
    image = _image(nothing, np.dtype(np.uint8), affine, header)
    layers = max(1, MASK_BLOCK // math.prod(stored[:2]))
    slowest = "DHW".index(order.dims[2])
    with _created(path) as stream:
        image.header.set_slope_inter(1, 0)
        image.header.write_to(stream)
        stream.write(bytes(image.header.get_data_offset() - stream.tell()))
        for k in range(0, stored[2], layers):
            end = min(k + layers, stored[2])
            interval = (
                (stored[2] - end, stored[2] - k) if order.dims[2] in order.flipped else (k, end)
            )
            intervals = [(0, extent) for extent in extents]
            intervals[slowest] = interval
            slab = order.from_volume(read(Box.of(intervals))[None])
            stream.write(slab.astype(np.uint8, copy=False).tobytes("F"))


def save_image(
    path: Path,
    values: NDArray[Any],
    dtype: np.dtype[Any],
    affine: Floats | None,
    header: Any,
) -> None:
    """Writes the values (i, j, k) as ``dtype``; without ``affine`` the header's is kept."""
    image = _image(values, dtype, affine, header)
    with _created(path) as stream:
        image.to_stream(stream)


def _image(values: NDArray[Any], dtype: np.dtype[Any], affine: Floats | None, header: Any) -> Any:
    nibabel = optional.nibabel()
    kind = nibabel.Nifti2Image if isinstance(header, nibabel.Nifti2Header) else nibabel.Nifti1Image
    return kind(values, affine, header, dtype=dtype)


@contextmanager
def _created(path: Path) -> Iterator[Any]:
    """Gives a stream to a new file, packed if its name says so, that is renamed when complete."""
    suffix = next((s for s in reversed(NIFTI_SUFFIXES) if path.name.endswith(s)), None)
    if suffix is None:
        raise DataError(f"{path}: the name of a NIfTI file ends in {' or '.join(NIFTI_SUFFIXES)}")
    writing = system_errors_as(DataError, f"cannot write {path}", named=False)
    with writing, created_aside(path) as file:
        if suffix == ".nii":
            yield file
            return
        with gzip.GzipFile("", "wb", FASTEST, file, mtime=0) as pack:
            yield pack


def unpack(path: Path, to: IO[bytes]) -> None:
    """Unpacks a packed file, piece by piece, and compares the sum at its end; see `open_nifti`."""
    file = open_nifti(path)
    left = int(file.image.dataobj.offset) + math.prod(file.image.shape) * file.itemsize
    with files.naming(path, NIFTI, files.ANY), files.open_gzip_to_end(path) as packed:
        while left:
            piece = packed.read(min(left, files.GZIP_PIECE))
            if not piece:
                raise EOFError(f"it lacks {left} bytes")
            to.write(piece)
            left -= len(piece)
