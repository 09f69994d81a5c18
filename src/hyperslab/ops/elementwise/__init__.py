"""Elementwise operators: pointwise ones, activations, dropout, creation of tensors."""

from hyperslab.ops.elementwise import (
    activations,
    alpha_dropout,
    creation,
    differences,
    draws,
    dropout,
    pointwise,
    rectifiers,
)

__all__ = [
    "activations",
    "alpha_dropout",
    "creation",
    "differences",
    "draws",
    "dropout",
    "pointwise",
    "rectifiers",
]
