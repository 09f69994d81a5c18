"""From a folder of one format to a folder of another, sample by sample and byte by byte.

`plan` says what there is to do, `work` does it for one volume in a process of its own: a `target`
writes what `stream` reads, `verify` reads it back. `run` gives the files their names, and `record`
remembers.
"""

from hyperslab.convert.request import Outcome, Request
from hyperslab.convert.run import convert

__all__ = ["Outcome", "Request", "convert"]
