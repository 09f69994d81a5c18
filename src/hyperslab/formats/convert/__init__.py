"""Converts a folder of one format to a folder of another, sample by sample and byte by byte.

`run` plans what there is to do, converts each volume in a process of its own (a `Writer` writes
what a `Source` reads, and it is read back), gives the files their names, and remembers. `scans`
brings CT scans to one lattice.
"""

from hyperslab.formats.convert.run import Outcome, Request, convert

__all__ = ["Outcome", "Request", "convert"]
