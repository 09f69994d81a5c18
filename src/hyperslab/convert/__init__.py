"""From a folder of one format to a folder of another, sample by sample and byte by byte.

`plan` says what there is to do, `worker` does it for one volume in a process of its own: a `Writer`
writes what a `Source` reads, `verify` reads it back. `run` gives the files their names, and
`journal` remembers.
"""

from hyperslab.convert.request import Outcome, Request
from hyperslab.convert.run import convert

__all__ = ["Outcome", "Request", "convert"]
