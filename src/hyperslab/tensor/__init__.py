"""`Sharded`, the tensor that knows its global shape, and the strict table of operators."""

from hyperslab.tensor.boxes import LoadedBoxes, boxes
from hyperslab.tensor.dispatch import RULES, Rule, register
from hyperslab.tensor.inputs.scatter import scatter
from hyperslab.tensor.redistribute import gather, shard
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
