"""Writes universes in the layout of CAMELS' 3D grids.

    python benchmarks/camels_twin.py UNIVERSES OUT [--sum 2] [--count N]

UNIVERSES is a folder that `hyperslab simulate` made. OUT gets one array of float32, (N, D, H, W),
for each redshift, `Grids_Mtot_Twin_LH_<size>_z=<z>.npy`, and a row of parameters for each universe
in `params_LH_Twin.txt`. Values are the density of all matter in (Msun/h)/(Mpc/h)^3, as in CAMELS.
A particle mesh knows no gas, so the channels are redshifts of one field, where CAMELS has several
fields of one redshift. With `--sum 2`, 2^3 voxels become one, which has the particles of all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import hyperslab as hs

CRITICAL_DENSITY = 2.77536627e11
"""The density of a flat universe today [(Msun/h)/(Mpc/h)^3]."""


def write_twin(universes: Path, out: Path, *, summed: int = 1, count: int | None = None) -> Path:
    """Writes the first ``count`` universes, all without it, and returns the table's path.

    Raises:
        DataError: the folder holds no universes that have redshifts and ``Omega_m``, fewer than
            ``count``, or such of extents that ``summed`` does not divide.
    """
    with hs.open(universes, hs.Grid(), batch_size=1, split="all") as data:
        source = data.source
        channels, *extents = source.shape
        names = source.parameters.names
        count = len(source.names) if count is None else count
        if "Omega_m" not in names or len(source.redshifts) != channels:
            raise hs.DataError(f"{universes}: its volumes need redshifts and Omega_m")
        if count > len(source.names):
            raise hs.DataError(f"{universes}: has {len(source.names)} universes, not {count}")
        if any(extent % summed for extent in extents):
            raise hs.DataError(f"{universes}: --sum {summed} does not divide {extents}")
        whole = hs.geometry.Box((0,) * 4, source.shape)
        physical = source.parameters.physical(
            np.stack([source.target(sample) for sample in range(count)])
        )
        small = [extent // summed for extent in extents]
        out.mkdir(parents=True, exist_ok=True)
        grids = [
            np.lib.format.open_memmap(
                out / f"Grids_Mtot_Twin_LH_{small[0]}_z={float(redshift)}.npy",
                mode="w+",
                dtype=np.float32,
                shape=(count, *small),
            )
            for redshift in source.redshifts
        ]
        blocks = [part for extent in small for part in (extent, summed)]
        for sample in range(count):
            particles = np.asarray(source.read(sample, whole), np.float64)
            summed_up = particles.reshape(channels, *blocks).sum((2, 4, 6))
            mean = physical[sample, names.index("Omega_m")] * CRITICAL_DENSITY
            for grid, field in zip(grids, summed_up, strict=True):
                grid[sample] = mean * field / field.mean()
    table = out / "params_LH_Twin.txt"
    np.savetxt(table, physical, header=" ".join(names), fmt="%.8g")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("universes", type=Path, help="folder of `hyperslab simulate`")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--sum", type=int, default=1, help="voxels along each side that become one")
    parser.add_argument("--count", type=int, help="universes to write; default: all")
    options = parser.parse_args()
    print(write_twin(options.universes, options.out, summed=options.sum, count=options.count))


if __name__ == "__main__":
    main()
