"""Says which widths CosmoFlow takes, without torch."""

from __future__ import annotations

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
