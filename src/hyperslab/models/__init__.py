"""Builds networks as plain torch modules, which do not know that a volume may be cut."""

from hyperslab.models.cosmoflow import CosmoFlow
from hyperslab.models.unet3d import UNet3D

__all__ = ["CosmoFlow", "UNet3D"]
