"""What a sweep file may say: the keys, their types and their defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    field_validator,
)

from hyperslab.recipe.section import Section

SWEPT = ("optimizer.learning_rate", "seed", "output")
"""Keys of a recipe that a sweep sets itself."""


def _different(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values or len(set(values)) < len(values):
        raise ValueError("give at least one value, and none twice")
    return values


Rates = Annotated[tuple[PositiveFloat, ...], AfterValidator(_different)]
Seeds = Annotated[tuple[NonNegativeInt, ...], AfterValidator(_different)]


class VariantSection(Section):
    """Keys of the recipe that differ, dotted, with their values.

    ``rates`` and ``seeds`` take the place of the sweep's.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    rates: Rates | None = None
    seeds: Seeds | None = None

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of the recipe."""
        return dict(self.model_extra or {})


class ChoiceSection(Section):
    """How the learning rate of a variant is chosen: by the validation loss of shorter runs."""

    epochs: Annotated[float, Field(gt=0, le=1)] = 1 / 3  # share of the recipe's
    seeds: Seeds | None = None  # None: the variant's first


class SweepFile(Section):
    """One sweep."""

    recipe: Path  # relative to the sweep file
    variants: dict[str, VariantSection]
    rates: Rates
    seeds: Seeds
    choose: ChoiceSection = ChoiceSection()
    output: Path | None = None  # the folder of all runs; None: runs/ and the file's name

    @field_validator("variants")
    @classmethod
    def _named(cls, variants: dict[str, VariantSection]) -> dict[str, VariantSection]:
        if not variants:
            raise ValueError("give at least one variant; one without changes is NAME: {}")
        for name, variant in variants.items():
            if not re.fullmatch(r"\w[\w .+=,²³-]*", name):
                raise ValueError(f"variant {name!r}: a folder is to have this name")
            for key in variant.keys:
                if key in SWEPT:
                    raise ValueError(f"variant {name!r}: {key} is set by the sweep itself")
        return variants
