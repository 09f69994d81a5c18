"""What a recipe may say of when a training is good enough, and of MLPerf, which asks for that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from hyperslab.recipe.section import Section


class StopSection(Section):
    """Training ends after the first epoch whose validation has no more than all that is given."""

    validation_loss: PositiveFloat | None = None  # at most
    validation_mae: PositiveFloat | None = None  # at most, of networks that predict numbers

    @model_validator(mode="after")
    def _something(self) -> StopSection:
        if not self.wanted:
            raise ValueError("stop_at needs validation_loss or validation_mae")
        return self

    @property
    def wanted(self) -> dict[str, float]:
        """The most that each measure may be."""
        return {name: value for name, value in self.model_dump().items() if value is not None}

    def reached(self, measured: Mapping[str, float | None]) -> bool:
        """Whether a validation is as good as that."""
        found = [(measured.get(name), most) for name, most in self.wanted.items()]
        return all(value is not None and value <= most for value, most in found)


class MlperfSection(Section):
    """What MLPerf's log says of a submission; with this section it is written, see `MlperfLog`."""

    org: Annotated[str, Field(min_length=1)]  # who submits
    platform: Annotated[str, Field(min_length=1)]  # the name of the machine
    division: Literal["closed", "open"] = "open"  # of MLPerf's rules
    status: Literal["cloud", "onprem", "preview", "research"] = "research"  # of the machine
