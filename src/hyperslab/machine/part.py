"""The base of all parts of a machine file."""

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """No unknown keys, no changes, no infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
