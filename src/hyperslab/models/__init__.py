"""Builds networks as plain torch modules, which do not know that a volume may be cut.

A network is imported when it is first asked for: `widths` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyperslab.util import importing_names

if TYPE_CHECKING:
    from hyperslab.models.cosmoflow import CosmoFlow
    from hyperslab.models.multiscale import MultiscaleNet
    from hyperslab.models.unet3d import UNet3D

__all__ = ["CosmoFlow", "MultiscaleNet", "UNet3D"]

__getattr__ = importing_names(__name__)
