"""Integer geometry: boxes, partitions, windows, transfers. Standard library only."""

from hyperslab.geometry.adaptive_window import AdaptiveWindow, scale_cut
from hyperslab.geometry.box import Box, Interval
from hyperslab.geometry.partition import Cover, Cut, Partition
from hyperslab.geometry.transfer import Transfer, TransferPlan, plan_transfers, transfers
from hyperslab.geometry.transposed_window import Crop, TransposedWindow
from hyperslab.geometry.window import Window, WindowMap

__all__ = [
    "AdaptiveWindow",
    "Box",
    "Cover",
    "Crop",
    "Cut",
    "Interval",
    "Partition",
    "Transfer",
    "TransferPlan",
    "TransposedWindow",
    "Window",
    "WindowMap",
    "plan_transfers",
    "scale_cut",
    "transfers",
]
