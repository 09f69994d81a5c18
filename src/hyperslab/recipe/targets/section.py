"""`TargetSection`: what a recipe says of a class of anybody's: its name and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from hyperslab.recipe.section import Section


class TargetSection(Section):
    """A section that may name a ``target``; then keys that are not the section's are arguments.

    ``target``: the dotted name of a class, such as ``monai.networks.nets.SegResNet``; nothing is
    imported before it is needed. ``arguments`` takes those that have the name of a key of the
    section, too.
    """

    target: str | None = None  # the dotted name of a class; other keys are then its arguments
    arguments: dict[str, Any] = Field(default={})  # those that have the name of a key here

    @model_validator(mode="before")
    @classmethod
    def _gather_arguments(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not values.get("target"):
            return values
        own = {key: value for key, value in values.items() if key in cls.model_fields}
        others = {key: value for key, value in values.items() if key not in cls.model_fields}
        given = own.get("arguments", {})
        if not isinstance(given, Mapping):
            return values
        return {**own, "arguments": {**given, **others}}

    @model_serializer(mode="wrap")
    def _flatten_arguments(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As one would write it: arguments among the keys, but those that have a key's name."""
        values: dict[str, Any] = dump(self)
        if "arguments" not in values:
            return values
        arguments = values.pop("arguments")
        if self.target is None:
            values.pop("target", None)
            return values
        clashing = {k: v for k, v in arguments.items() if k in type(self).model_fields}
        others = {k: v for k, v in arguments.items() if k not in clashing}
        return {**values, **others, **({"arguments": clashing} if clashing else {})}
