"""Defines `Sharded`, the tensor that knows its global shape, and the strict table of operators."""

import importlib

from hyperslab.tensor.dispatch import RULES, Rule, register
from hyperslab.tensor.redistribute import LoadedBoxes, boxes, gather, shard
from hyperslab.tensor.root_rank import scatter
from hyperslab.tensor.sharded import Sharded

__all__ = [
    "RULES",
    "LoadedBoxes",
    "Rule",
    "Sharded",
    "boxes",
    "gather",
    "register",
    "scatter",
    "shard",
]

# A cut tensor is of no use without the rules. They build on this package and enter themselves when
# they are imported, so it names them without importing from them.
importlib.import_module("hyperslab.ops")
