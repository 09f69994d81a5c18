"""CT volumes: NIfTI files in one orientation and on one lattice (the extra `medical`).

`read` reads a volume and `write_mask` writes a mask of it; `convert_scans` makes a folder for
`hyperslab.open` of what `find` found or `make_phantoms` made.
"""

from hyperslab.ct.import_scans import ScanOutcome, convert_scans
from hyperslab.ct.phantom import list_phantoms, make_phantoms
from hyperslab.ct.respace import respace_scans
from hyperslab.ct.scan_file import Shape
from hyperslab.formats.nifti.image import CtVolume, read, read_labels, write_mask
from hyperslab.formats.nifti.pairs import Pair, find

__all__ = [
    "CtVolume",
    "Pair",
    "ScanOutcome",
    "Shape",
    "convert_scans",
    "find",
    "list_phantoms",
    "make_phantoms",
    "read",
    "read_labels",
    "respace_scans",
    "write_mask",
]
