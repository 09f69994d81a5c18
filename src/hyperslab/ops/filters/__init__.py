"""What a layer takes of its weight: a rank's share of its filters, in the type it computes in."""

from hyperslab.ops.filters.parameters import operand_type, taken
from hyperslab.ops.filters.share import filter_share

__all__ = ["filter_share", "operand_type", "taken"]
