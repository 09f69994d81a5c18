"""Elementwise operators: pointwise ones, activations, dropout, creation of tensors."""

from hyperslab.ops.elementwise import (
    activations,
    creation,
    differences,
    draws,
    dropout,
    pointwise,
    rectifiers,
)

__all__ = [
    "activations",
    "creation",
    "differences",
    "draws",
    "dropout",
    "pointwise",
    "rectifiers",
]
