"""Integer geometry: boxes, partitions, windows, transfers. Standard library only.

The words of this project, each defined here and nowhere else again:

volume
    The spatial extent of a sample: depth, height, width.
box
    A half-open region of a volume, or of a tensor, in global indices.
grid
    All ranks, arranged along the axes data, depth, height and width.
axis
    One of these four. A grid has axes, a tensor has *dims*.
cut, partition
    How one dim is divided over the ranks of an axis; a cut, or none, for each dim of a tensor.
shard
    What a cut gives to one rank of its axis: an interval of a dim.
block
    The elements of a tensor that a rank holds: those of its box.
window
    Which inputs one output of a convolution or a pooling reads.
halo
    What a rank's outputs read that it does not own.
cover
    A box for each rank that may overlap others, such as blocks with their halos.
transfer, plan
    A box on its way between two ranks; all that one rank sends, receives and keeps.
replica
    The ranks that share one sample. The data axis has as many positions as there are replicas.
hyperslab
    A box on disk.
sample
    A volume, with channels, and its *target* (numbers) or *labels* (a class for every voxel).
mini-batch, local batch, slot
    The samples of a step; what one rank holds of them; the place of one sample among them.
store, owner
    The boxes that ranks keep in memory between epochs; the replica that keeps a sample.
transform, augmentation
    A change of values (log(x + 1)); a change of axes (flips, permutations).
fingerprint, manifest
    Size and time of a file, to notice changes; what a converted folder was made of.
"""

from hyperslab.geometry.box import Box, Interval
from hyperslab.geometry.partition import Cover, Cut, Partition
from hyperslab.geometry.transfer import Transfer, TransferPlan, plan_transfers, transfers
from hyperslab.geometry.window import (
    AdaptiveWindow,
    Crop,
    TransposedWindow,
    Window,
    WindowMap,
    scale_cut,
)

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
