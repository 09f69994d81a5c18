"""Runs written by hand: a network with random weights and its recipe; no training."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from hyperslab.checkpoint.run_state import DataCard
from hyperslab.checkpoint.save_load import save
from hyperslab.data import Parameters
from hyperslab.models import MultiscaleNet, UNet3D

LATTICE = (10, 13, 12)
CLASSES = ("background", "organ", "lesion")
WINDOW = (-200.0, 300.0)
NAMES = ("Omega_m", "sigma_8", "n_s", "H_0")
SCANS = DataCard((1, *LATTICE), (1, *LATTICE), CLASSES, Parameters.normalised(()))
UNIVERSES = DataCard(
    (4, 16, 16, 16),
    (4, 16, 16, 16),
    (),
    Parameters(NAMES, (0.3, 0.8, 0.96, 70.0), (0.03, 0.08, 0.1, 7.0)),
)


def unet(seed: int = 0, levels: int = 2) -> UNet3D:
    torch.manual_seed(seed)
    model = UNet3D(1, len(CLASSES), channels=2, levels=levels)
    model(torch.randn(2, 1, 16, 16, 16))  # running statistics of their own
    return model.eval()


SMALL = {"name": "multiscale", "channels": [4, 8], "hidden": 16}
"""A network of universes whose checkpoints are written at once."""


def multiscale() -> MultiscaleNet:
    torch.manual_seed(0)
    model = MultiscaleNet(channels=(4, 8), hidden=16).eval()
    nn.init.normal_(model.head.get_parameter("6.weight"), std=0.1)
    return model


def write_run(folder: Path, network: nn.Module, about: DataCard, **recipe: Any) -> Path:
    """The folder of a run; its data are not there."""
    values: dict[str, Any] = {
        "data": {"path": str(folder / "gone"), "batch_size": 1},
        "device": "cpu",
        "timeout": 60,
        "output": str(folder),
    }
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values | recipe))
    save(folder / "checkpoints" / "step-00000007", network, about=asdict(about))
    (folder / "checkpoints" / "best").symlink_to("step-00000007")
    return folder


def write_segmentation(folder: Path, *, seed: int = 0, levels: int = 2) -> Path:
    network = {"name": "unet3d", "channels": 2, "levels": levels}
    data = {"path": str(folder / "gone"), "batch_size": 1, "window": list(WINDOW)}
    return write_run(folder, unet(seed, levels), SCANS, model=network, loss="dice", data=data)


def write_regression(folder: Path, *, whole: int = 16) -> Path:
    about = replace(UNIVERSES, whole=(4, whole, whole, whole))
    data: dict[str, Any] = {"path": str(folder / "gone"), "batch_size": 2}
    if whole != 16:
        data["subvolume"] = 16
    return write_run(folder, multiscale(), about, model=SMALL, data=data)
