"""Declares what every section of a recipe has in common, and tables of the names that keys take.

A `Section` has no unknown keys; a `TargetSection` may name a class of anybody's with its
arguments; `OneOf` marks a key that takes one of a list of words that may grow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, Union, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from hyperslab.errors import RecipeError
from hyperslab.recipe.trust import NO_TRUST, Trust

Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""Limits a seed to what torch takes."""

UserPath = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]
"""Takes ``~/runs`` for what a shell does: no shell sees it in a file, or behind ``output=``."""


class Section(BaseModel):
    """A part of a recipe: no unknown keys, no changes, no infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    def contradictions(self) -> Iterator[str]:
        """Find what keys say together that cannot be; the first is the error of the section."""
        return iter(())

    @model_validator(mode="after")
    def _without_contradictions(self) -> Self:
        for problem in self.contradictions():
            raise ValueError(problem)
        return self


class CodeSection(Section):
    """A section that names code, and knows from whom it is; by default from anybody.

    The caller that validates it says so, by the context ``{"trust": ...}``.
    """

    _trust: Trust = PrivateAttr(default=NO_TRUST)

    @property
    def trust(self) -> Trust:
        return self._trust

    def model_post_init(self, context: Any, /) -> None:
        if context is not None:
            self._trust = context["trust"]


class TargetSection(CodeSection):
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
        """Write arguments among the keys, as one would, but those that have a key's name."""
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


class NamedSection(Section):
    """One of several kinds of a section, told apart by the ``name`` that each of them declares."""

    if TYPE_CHECKING:
        name: str

    def check(self) -> None:
        """Look at what is named from outside, and make nothing; raises as ``build`` does."""


def declared(base: type[NamedSection]) -> Any:
    """Return the union of the sections derived from ``base`` so far, told apart by their names.

    What a recipe may name is so what has been declared: there is no second list to keep.
    """
    return Annotated[Union[tuple(_named_sections(base))], Field(discriminator="name")]  # noqa: UP007


def declared_names(base: type[NamedSection]) -> list[str]:
    """Return the names that sections derived from ``base`` so far have in a recipe."""
    fields = [kind.model_fields["name"] for kind in _named_sections(base)]
    return [name for field in fields for name in get_args(field.annotation)]


def _named_sections(base: type[NamedSection]) -> Iterator[type[NamedSection]]:
    for kind in base.__subclasses__():
        if "name" in kind.model_fields:
            yield kind
        yield from _named_sections(kind)


T = TypeVar("T")


def choose(table: Mapping[str, T], name: str, key: str) -> T:
    """Return what ``name``, the value of ``key`` in a recipe, stands for.

    >>> choose({"adam": 1, "sgd": 2}, "sgd", "optimizer.name")
    2

    Raises:
        RecipeError: the table has no such name; nothing else is taken in its place.
    """
    if name not in table:
        raise RecipeError(f"bad value {name!r} for {key!r}: use one of {', '.join(table)}")
    return table[name]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Marks a key that takes one of a list of words that may grow; for errors."""

    words: Callable[[], Sequence[str]]
