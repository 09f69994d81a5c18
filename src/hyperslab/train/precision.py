"""The precision of a recipe: what torch computes in."""

from __future__ import annotations

import torch

from hyperslab.recipe.choices import choose

PRECISIONS: dict[str, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16}
"""By ``precision``: what autocast casts to, None for weights and values as they are."""


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """A context in which a network computes in the recipe's precision.

    Raises:
        RecipeError: `PRECISIONS` has no such name.
    """
    dtype = choose(PRECISIONS, precision, "precision")
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)
