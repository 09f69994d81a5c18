"""Integer geometry: boxes, partitions, windows, transfers. Standard library only."""

from hyperslab.geometry.box import Box, Interval
from hyperslab.geometry.partition import Cover, Cut, Partition
from hyperslab.geometry.transfer import Transfer, transfers
from hyperslab.geometry.window import Window

__all__ = ["Box", "Cover", "Cut", "Interval", "Partition", "Transfer", "Window", "transfers"]
