"""`Sharded`, the tensor that knows its global shape, and the strict table of operators."""

from hyperslab.tensor.convert import gather, shard
from hyperslab.tensor.registry import RULES, Rule, register
from hyperslab.tensor.sharded import Sharded

__all__ = ["RULES", "Rule", "Sharded", "gather", "register", "shard"]
