"""Builds networks as plain torch modules, which do not know that a volume may be cut.

A network is imported when it is first asked for: which widths there are takes no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyperslab.util import importing_names

if TYPE_CHECKING:
    from hyperslab.models.cosmoflow import CosmoFlow
    from hyperslab.models.unet3d import UNet3D

__all__ = ["CosmoFlow", "UNet3D"]

__getattr__ = importing_names(__name__, {"cosmoflow": ("CosmoFlow",), "unet3d": ("UNet3D",)})

COSMOFLOW_WIDTHS: dict[str, tuple[int, ...]] = {
    "paper2020": (16, 32, 64, 128, 256, 512),
    "sc18": (128, 64, 32),
    "lbann": (16, 32, 64, 128, 256, 512),
    "mlperf": (32, 64, 128, 256, 512),
}
"""The widths that each variant of CosmoFlow takes."""


def check_width(variant: str, width: int) -> None:
    """Raise ValueError, with what is allowed, for a variant or a width that does not exist."""
    if variant not in COSMOFLOW_WIDTHS:
        raise ValueError(
            f"CosmoFlow has no variant {variant!r}: use one of {', '.join(COSMOFLOW_WIDTHS)}"
        )
    if width not in COSMOFLOW_WIDTHS[variant]:
        allowed = ", ".join(map(str, COSMOFLOW_WIDTHS[variant]))
        raise ValueError(f"CosmoFlow {variant!r} takes no width {width!r}: use one of {allowed}")
