"""Networks as plain torch modules: nothing here knows that a volume may be cut."""

from hyperslab.models.cosmoflow import CosmoFlow
from hyperslab.models.unet3d import UNet3D

__all__ = ["CosmoFlow", "UNet3D"]
