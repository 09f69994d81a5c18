"""Defines `Sharded`, the tensor that knows its global shape, and the strict table of operators."""

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
