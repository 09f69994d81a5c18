"""The memory of a rank while it predicts the mask of one volume in Zarr.

    python benchmarks/predict_memory.py FOLDER [--size 256] [--window 64] [--ranks 1 2 4 8]
        [--format zarr] [--json OUT]

Makes a volume of uint8 in FOLDER, chunk by chunk, and the run of a small U-Net with random weights,
and predicts it with `hyperslab.train.predict.predict` in fresh processes of one thread, cut along
the depth; ``--window 0`` predicts it whole. Printed by number of ranks, for the rank that takes
most: the highest resident memory of its process (VmHWM, its own), that without what it held before
[MiB], and the seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
import zarr
from clock import machine
from launch import run_ranks
from resident import resident

from hyperslab.checkpoint.run_state import DataCard
from hyperslab.checkpoint.save_load import save
from hyperslab.data import Parameters
from hyperslab.models import UNet3D
from hyperslab.train.mask_files import MaskFormat
from hyperslab.train.predict import predict
from hyperslab.train.samples import WindowPolicy

MIB = 1 << 20
CHUNK = 64
CLASSES = ("background", "organ")


def make_volume(path: Path, size: int) -> Path:
    """Write a volume (D, H, W) of noise, layer by layer; one that is there is kept."""
    if path.exists():
        return path
    group = zarr.create_group(path, zarr_format=3)
    chunks = (min(CHUNK, size),) * 3
    config = {"write_empty_chunks": True}
    stored = group.create_array("raw", shape=(size,) * 3, chunks=chunks, dtype="u1", config=config)
    numbers = np.random.default_rng(0)
    for lo in range(0, size, CHUNK):
        part = (min(CHUNK, size - lo), size, size)
        stored[lo : lo + CHUNK] = numbers.integers(0, 256, part, np.uint8)
    return path


def make_run(folder: Path, size: int) -> Path:
    """Write the folder of a run that was not trained."""
    if folder.exists():
        return folder
    torch.manual_seed(0)
    network = UNet3D(1, len(CLASSES), channels=2, levels=2)
    network(torch.randn(2, 1, 16, 16, 16))
    shape = (1, size, size, size)
    about = DataCard(shape, shape, CLASSES, Parameters.normalised(()), dtype="uint8")
    data = {
        "path": str(folder / "data"),
        "batch_size": 1,
        "window": [0, 255],
        "keys": {"volume": "raw", "labels": "labels"},
        "classes": list(CLASSES),
    }
    recipe = {
        "data": data,
        "model": {"name": "unet3d", "channels": 2, "levels": 2},
        "loss": "dice",
        "device": "cpu",
        "output": str(folder),
    }
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    save(folder / "checkpoints" / "step-00000001", network.eval(), about=asdict(about))
    (folder / "checkpoints" / "best").symlink_to("step-00000001")
    return folder


def one_rank(
    folder: Path, sizes: list[int], out: Path, format: MaskFormat, side: int, grid: str
) -> dict[str, float]:
    """Predict a small volume, for libraries and buffers, then the other one."""
    windows = WindowPolicy((side,) * 3, 0.0) if side else None
    runs = [folder / f"run{size}" for size in sizes]
    warm_up, volume = [folder / f"v{size}.zarr" for size in sizes]
    options: dict[str, Any] = {"native": True, "format": format, "overrides": [grid]}
    predict(runs[0], [warm_up], out / "small", windows=windows, **options)
    before = resident("VmRSS")
    begun = time.perf_counter()
    (outcome,) = predict(runs[1], [volume], out / "mask", windows=windows, **options)
    assert outcome.state == "predicted", outcome
    peak = resident("VmHWM")
    return {"process": peak / MIB, "grown": (peak - before) / MIB, "s": time.perf_counter() - begun}


def measure(folder: Path, size: int, side: int, ranks: int, format: MaskFormat) -> dict[str, float]:
    """The highest numbers of all ranks; the mask stays in FOLDER."""
    sizes = [max(16, side), size]
    for one in sizes:
        make_volume(folder / f"v{one}.zarr", one)
        make_run(folder / f"run{one}", one)
    out = folder / f"out-{size}-{side}-{ranks}-{format}"
    found = run_ranks(ranks, one_rank, folder, sizes, out, format, side, f"grid.depth={ranks}")
    return {key: max(rank[key] for rank in found) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--window", type=int, default=64, help="voxels a side; 0: whole")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--format", default="zarr", choices=["nifti", "hdf5", "zarr"])
    parser.add_argument("--json", type=Path, metavar="OUT", help="the rows so far")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text())
    for ranks in options.ranks:
        key = f"{options.size} window {options.window} {options.format} ranks {ranks}"
        found = measure(options.folder, options.size, options.window, ranks, options.format)
        rows[key] = {**machine(), **found}
        print(key, {name: round(value, 1) for name, value in found.items()}, flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
