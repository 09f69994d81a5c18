"""Tiny scans and recipes for them: a bright ball (organ) with a dark spot (lesion) in noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import yaml

CLASSES = ("background", "organ", "lesion")
SHAPE = (10, 13, 12)
WINDOW = (-100.0, 200.0)


def write_scans(folder: Path, count: int, *, shape: tuple[int, ...] = SHAPE) -> Path:
    """Files as `hyperslab convert` makes them, of extents that fit neither grid nor strides."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(3)
    at = np.stack(np.meshgrid(*(np.arange(n) / n for n in shape), indexing="ij"))
    for i in range(count):
        centre = random.uniform(0.4, 0.6, (3, 1, 1, 1))
        distance = np.sqrt(((at - centre) ** 2).sum(0))
        classes = (distance < 0.3).astype(np.uint8) + (distance < 0.15)
        values = np.array([-50, 100, 20])[classes] + random.normal(0, 30, shape)
        with h5py.File(folder / f"volume-{i}.hdf5", "w") as file:
            file["volume"] = values[None].round().astype(np.int16)
            file["segmentation"] = classes[None]
            file.attrs["classes"] = np.array(CLASSES, "S")
            file.attrs["affine"] = np.diag([2.0, 1.5, 1.5, 1.0])[[2, 1, 0, 3]]
    return folder


def write_recipe(path: Path, data: Path, **keys: Any) -> Path:
    """A recipe for them; 11 of 13 train, 1 validates, 1 tests."""
    values: dict[str, Any] = {
        "model": {"name": "unet3d", "channels": 2, "levels": 2},
        "data": {"path": str(data), "batch_size": 4, "augment": True, "window": list(WINDOW)},
        "loss": "dice_cross_entropy",
        "optimizer": {"learning_rate": 1e-2, "eps": 1e-3},
        "epochs": 3,
        "checkpoint": {"every": 10},
        "device": "cpu",
        "timeout": 60,
        "output": str(path.with_suffix("")),
    }
    path.write_text(yaml.safe_dump({**values, **keys}))
    return path
