"""A way to compute a pass, and for which problems there is it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hyperslab.ops.kernels.convolution.options import Problem


def _always(_: Problem) -> bool:
    """For every problem."""
    return True


@dataclass(frozen=True, slots=True)
class ConvVariant:
    """``run`` takes blocks in channels last, the problem last, and gives such blocks.

    ``copies``: it takes the memory of another copy of a block while it runs.
    """

    run: Callable[..., Any]
    legal: Callable[[Problem], bool] = _always
    copies: bool = False


ConvVariants = Mapping[str, ConvVariant]
"""By their names, all of one pass."""
