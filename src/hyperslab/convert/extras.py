"""What a file holds beside its voxels, to be carried over."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hyperslab.formats.keyed.header import kind_of, opened
from hyperslab.formats.keyed.source import KeyedFolder
from hyperslab.formats.nifti.source import NiftiFolder, affine_of
from hyperslab.formats.shared.checks import naming
from hyperslab.formats.shared.labels import KEYS
from hyperslab.formats.source import Source
from hyperslab.formats.subvolumes import Subvolumes
from hyperslab.formats.writer import Extras

PLAIN = ("full", "unitPar")
"""The keys of the public files, for what comes from files without keys."""

CARRIED = ("physPar", "redshifts")


def extras_of(source: Source, sample: int) -> Extras:
    """The extras of a sample.

    A part has those of its volume but for the attributes and the affine, which speak of the whole.

    Raises:
        DataError: the file cannot be read.
    """
    match source:
        case Subvolumes():
            whole = extras_of(source.source, sample // len(source.places))
            return Extras(whole.keys, whole.names, whole.target, whole.arrays)
        case KeyedFolder():
            return _keyed(source, sample)
        case NiftiFolder():
            return Extras(KEYS, (), affine=affine_of(source, sample))
    return Extras(PLAIN, source.parameters.names, source.target(sample))


def _keyed(source: KeyedFolder, sample: int) -> Extras:
    path = Path(source.where(sample))
    with naming(path, kind_of(path)), opened(path) as file:
        attributes = dict(file.attrs)
        if source.classes:
            affine = np.asarray(attributes.get("affine"))
            known = affine.shape == (4, 4) and affine.dtype.kind == "f"
            return Extras(KEYS, (), attributes=attributes, affine=affine if known else None)
        volume = source.catalog.layout.key
        target = "unitPar" if volume == "full" else "y"
        arrays = {key: np.asarray(file[key][()]) for key in CARRIED if key in file}
        values = np.asarray(file[target][()])
    return Extras((volume, target), source.parameters.names, values, arrays, attributes)
