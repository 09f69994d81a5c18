"""Draws cut.png, the picture of the README: `python docs/images/cut.py UNIVERSE.hdf5`."""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

from hyperslab.geometry import Box, Cut, Partition, Window

HALO = 5  # voxels, wider than a convolution's so that it can be seen
MINE = {"height": 0, "width": 1}


def main(path: str) -> None:
    with h5py.File(path) as file:
        cube = file["full"][..., 0]  # redshift 0
    density = np.log1p(cube[: cube.shape[0] // 6].mean(0))
    extent = density.shape[0]
    cuts = (Cut.balanced("height", extent, 2), Cut.balanced("width", extent, 2))
    partition = Partition((extent, extent), cuts)
    figure, (whole, part) = plt.subplots(1, 2, figsize=(9.6, 4.9), layout="constrained")
    for axes in (whole, part):
        axes.imshow(
            density, cmap="magma", vmax=np.quantile(density, 0.998), interpolation="bilinear"
        )
        axes.set_xticks([])
        axes.set_yticks([])
    draw_whole(whole, partition)
    draw_part(part, partition)
    figure.savefig(Path(__file__).with_name("cut.png"), dpi=100)


def draw_whole(axes: plt.Axes, partition: Partition) -> None:
    axes.set_title("one sample, four ranks", fontsize=10)
    for rank, coords in enumerate(partition.peers(MINE)):
        box = partition.box(coords)
        outline(axes, box, color="white", linewidth=1.5)
        axes.text(
            box.lo[1] + 3, box.lo[0] + 3, f"rank {rank}", color="white", fontsize=11, va="top"
        )


def draw_part(axes: plt.Axes, partition: Partition) -> None:
    axes.set_title("what rank 1 holds, and the halo it borrows", fontsize=10)
    window = Window(2 * HALO + 1, before=HALO, after=HALO)
    own = partition.box(MINE)
    wanted = Box.of([window.reads(own.interval(dim)) for dim in range(2)])
    inside = wanted.intersect(Box.whole(partition.shape))
    shade = np.full((*partition.shape, 4), (0, 0, 0, 0.72))
    shade[inside.slices()] = (0.25, 0.75, 1.0, 0.35)
    shade[own.slices()] = 0
    axes.imshow(shade)
    outline(axes, own, color="white", linewidth=1.5)
    outline(axes, inside, color="#5bc0ff", linewidth=1.5, linestyle="--")


def outline(axes: plt.Axes, box: Box, **style: object) -> None:
    corner = (box.lo[1] - 0.5, box.lo[0] - 0.5)
    axes.add_patch(Rectangle(corner, box.shape[1], box.shape[0], fill=False, **style))


if __name__ == "__main__":
    main(sys.argv[1])
