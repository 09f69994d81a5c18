"""Makes objects of the targets that a recipe names: found, checked, and only then called.

Whether it may be imported at all is decided in `trust`. Then a target has to be of the right kind
*before* it is called: a class that is derived from the kind's, or a function that says by its
annotation that it returns one. Any other function has to be named by the user himself. Arguments
are looked at by the target's signature and its annotations.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from hyperslab.errors import RecipeError, reason
from hyperslab.recipe.section import TargetSection
from hyperslab.recipe.trust import Trust, located

FLOAT_WORDS = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")  # YAML 1.1 takes 1e-3 for a text
NOT_YET = object()  # in place of a value that is not known before the data are


def positional_names(made: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that can be given by their place."""
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):  # written in C
        return []
    return [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]


def type_hints(made: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function, or of what makes an instance of a class."""
    try:
        return typing.get_type_hints(made.__init__ if isinstance(made, type) else made)  # type: ignore[misc]
    except Exception:  # names that are there for type checkers alone, say
        return {}


def check_argument_names(
    arguments: Mapping[str, Any],
    parameters: Mapping[str, inspect.Parameter],
    where: str,
    *,
    open_end: bool,
) -> None:
    unknown = [name for name in arguments if name not in parameters]
    if unknown and not open_end:
        near = difflib.get_close_matches(unknown[0], parameters, 1)
        nearest = f"nearest: {near[0]!r}; " if near else ""
        raise RecipeError(
            f"{where} takes no argument {unknown[0]!r}\n"
            f"    {nearest}it takes {', '.join(parameters) or 'none'}"
        )
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in arguments
    ]
    if missing:
        raise RecipeError(f"{where} needs the argument {missing[0]!r}: it is missing")


def typed_value(value: Any, hint: Any, default: Any, key: str, name: str) -> Any:
    """Return the value as its annotation has it; itself where that says nothing."""
    import torch  # what has this annotation has imported it

    if value is NOT_YET or (value is None and default is None):
        return value
    if isinstance(value, list) and torch.Tensor in (hint, *typing.get_args(hint)):
        return torch.tensor(value)
    if hint in (Any, inspect.Parameter.empty):
        return float(value) if isinstance(value, str) and FLOAT_WORDS.fullmatch(value) else value
    if isinstance(value, AN_OBJECT.classes):
        return value
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticUserError, TypeError, NameError, AttributeError):
        return value  # an annotation of which pydantic knows nothing
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        words = str(error.errors()[0]["msg"]).replace("Input should", "it should")
        wanted = getattr(hint, "__name__", None) if isinstance(hint, type) else None
        raise RecipeError(
            f"bad value {value!r} for {key!r}: {words} ({name} wants "
            f"{wanted or str(hint).replace('typing.', '')})"
        ) from None


REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True, slots=True)
class RightKind:
    """Says what a target has to be: of one of the ``classes``, or called, if it is ``deferred``.

    ``words`` name it in errors. A deferred function is not called for its result now but is the
    result, with the recipe's arguments filled in. Classes are given by their dotted names and
    imported when something is compared with them.
    """

    words: str
    names: tuple[str, ...]
    deferred_names: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[type, ...]:
        return tuple(map(_class_named, self.names))

    @property
    def deferred(self) -> tuple[type, ...]:
        return tuple(map(_class_named, self.deferred_names))


def _class_named(name: str) -> type:
    module, _, last = name.rpartition(".")
    found: type = getattr(importlib.import_module(module), last)
    return found


_MODULE, _OPTIMIZER = "torch.nn.Module", "torch.optim.Optimizer"
_SCHEDULER = "torch.optim.lr_scheduler.LRScheduler"

A_NETWORK = RightKind(f"a {_MODULE}", (_MODULE,))
A_LOSS = RightKind(
    f"a {_MODULE} or a function that returns a tensor", (_MODULE,), ("torch.Tensor",)
)
AN_OPTIMIZER = RightKind(f"a {_OPTIMIZER}", (_OPTIMIZER,))
A_SCHEDULE = RightKind(f"a {_SCHEDULER}", (_SCHEDULER,))
A_SOURCE = RightKind("a hyperslab.Source", ("hyperslab.formats.source.Source",))
AN_OBJECT = RightKind("an object of torch's", (_MODULE, _OPTIMIZER, _SCHEDULER))


@dataclass(frozen=True)
class Maker:
    """Makes the objects that one section of a recipe names.

    ``key``: of the section, for errors. ``given``: positional arguments that are not the recipe's.
    ``references``: what ``${data.channels}`` and the like stand for.
    """

    key: str
    kind: RightKind
    given: tuple[Any, ...] = ()
    references: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, section: TargetSection) -> Any:
        """Return what the target gives for its arguments.

        Raises:
            RecipeError: it cannot or must not be imported, is of another kind, lacks an argument,
                has one of another name or type, or does not take them; one line and the remedy.
        """
        assert section.target is not None
        return self._make(section.target, section.arguments, self.key, section.trust)

    def check(self, section: TargetSection) -> None:
        """Find it and look at its arguments; nothing is called. Raises as calling does."""
        assert section.target is not None
        made, _ = self._found(section.target, f"{self.key}.target", section.trust)
        self._bound(made, section.arguments, self.key, section.target, _known_now)

    def _make(self, name: str, arguments: Mapping[str, Any], key: str, trust: Trust) -> Any:
        made, deferred = self._found(name, f"{key}.target", trust)
        options = self._bound(made, arguments, key, name, partial(self._value, trust=trust))
        given = () if self._fills_given(made, arguments) else self.given
        if deferred:
            return partial(made, **options)
        try:
            result = made(*given, **options)
        except RecipeError:
            raise
        except (Exception, SystemExit) as error:  # whatever is wrong in somebody else's code
            raise RecipeError(
                f"{key}.target {name} does not take its arguments: {_one_line(error)}"
            ) from error
        if not isinstance(result, self.kind.classes):
            raise RecipeError(
                f"{key}.target {name} gave a {type(result).__qualname__}, not {self.kind.words}"
            )
        return result

    def _found(self, name: str, key: str, trust: Trust) -> tuple[Callable[..., Any], bool]:
        """Find what has the name, and whether it is the result itself."""
        found = imported(name, key, trust)
        trust.check_defined(found, name, key)
        if isinstance(found, type) and issubclass(found, self.kind.classes):
            return found, False
        if isinstance(found, type) or not callable(found):
            what = f"a {type(found).__name__}"
            if isinstance(found, type):
                what = f"a class of another kind ({found.__mro__[1].__name__})"
            raise RecipeError(f"{key} {name} is {what}, not {self.kind.words}")
        returned = type_hints(found).get("return")
        if not isinstance(returned, type):
            returned = object
        if issubclass(returned, self.kind.classes):
            return found, False
        answered = trust.answers_for(name)
        if self.kind.deferred and (issubclass(returned, self.kind.deferred) or answered):
            return found, True
        if answered:
            return found, False
        kinds = (*self.kind.classes, *self.kind.deferred)
        named = kinds[-1].__name__
        raise RecipeError(
            f"{key} {name} is a function without an annotation that it returns {self.kind.words}, "
            f"so a recipe may not call it\n    annotate it `-> {named}`, or name it on the command "
            f"line yourself: {key}={name}"
        )

    def _fills_given(self, made: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
        """Say whether the recipe itself has what would be given, as for `ChainedScheduler`."""
        return any(name in arguments for name in positional_names(made)[: len(self.given)])

    def _bound(
        self,
        made: Callable[..., Any],
        arguments: Mapping[str, Any],
        key: str,
        name: str,
        value_of: Callable[[Any, str], Any],
    ) -> dict[str, Any]:
        """Return the arguments, each of the type that its annotation asks for."""
        try:
            parameters = dict(inspect.signature(made).parameters)
        except (TypeError, ValueError):  # written in C
            return {k: value_of(value, f"{key}.{k}") for k, value in arguments.items()}
        if not self._fills_given(made, arguments):
            for taken in positional_names(made)[: len(self.given)]:
                del parameters[taken]
        open_end = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, 2)}
        if made is not None and self.kind.deferred and not isinstance(made, type):
            named = {n: p for i, (n, p) in enumerate(named.items()) if i >= 2 or n in arguments}
        check_argument_names(arguments, named, f"{key}.target {name}", open_end=open_end)
        annotations = type_hints(made)
        found = {}
        for argument, value in arguments.items():
            ready = value_of(value, f"{key}.{argument}")
            parameter = named.get(argument)
            default = parameter.default if parameter is not None else None
            found[argument] = typed_value(
                ready, annotations.get(argument, Any), default, f"{key}.{argument}", name
            )
        return found

    def _value(self, value: Any, key: str, *, trust: Trust) -> Any:
        """Fill references in, and put in the objects that are named within a value."""
        if isinstance(value, str) and (match := REFERENCE.fullmatch(value)):
            if match[1] not in self.references:
                there = ", ".join(f"${{{name}}}" for name in self.references)
                raise RecipeError(f"{key}={value} is not known here: there are {there or 'none'}")
            return self.references[match[1]]
        if isinstance(value, Mapping):
            if isinstance(value.get("target"), str):
                arguments = {k: v for k, v in value.items() if k not in ("target", "arguments")}
                arguments |= value.get("arguments", {})
                return self._make(value["target"], arguments, key, trust)
            return {k: self._value(v, f"{key}.{k}", trust=trust) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._value(v, f"{key}.{i}", trust=trust) for i, v in enumerate(value)]
        return value


def _known_now(value: Any, key: str) -> Any:
    text = str(value)
    return NOT_YET if REFERENCE.search(text) or "'target'" in text else value


def imported(name: str, key: str, trust: Trust) -> Any:
    """Import what a dotted name stands for, if it is allowed (`RecipeError`)."""
    try:
        return trust.imported(name, key)
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:  # whatever is wrong in somebody else's module
        raise RecipeError(f"{key} {name} cannot be imported: {_why_not(name, error)}") from error


def check_exists(name: str, key: str, trust: Trust) -> None:
    """Refuse what `imported` does, as far as it can be known without running its module."""
    trust.check_allowed(name, key)
    module, _, last = name.rpartition(".")
    if not module:
        raise RecipeError(f"{key} {name} cannot be imported: write package.Class")
    files = located(name)
    if not files:
        imported(name, key, trust)
    if module in sys.modules or len(files) != name.count("."):
        return  # it costs nothing to import it later; a module without a file
    with suppress(OSError, UnicodeDecodeError, RecursionError):
        text = _text_of(files[-1])
        if not re.search(rf"\b{re.escape(last)}\b|{_MAKES_NAMES}", text):
            there = re.findall(r"^ *(?:class |def )?(\w+)", text, re.MULTILINE)
            raise RecipeError(f"{key} {name} cannot be imported: {_has_no(name, there)}")


_MAKES_NAMES = r"import \*|__getattr__|setattr|exec\(|(globals|locals|vars)\(|__dict__|modules\["
"""Finds where the text of a module may make names that it does not hold."""


def _text_of(file: str) -> str:
    """Return a module's text, those of which it takes over all names behind it."""
    text = Path(file).read_text(encoding="utf-8")
    stars = r"^from (\w[\w.]*) import \*"
    for module in re.findall(stars, text, re.MULTILINE):
        files = located(f"{module}.any")
        if len(files) != module.count(".") + 1:
            return text  # with its star
        text += _text_of(files[-1])
    return re.sub(stars, "", text, flags=re.MULTILINE)


def _why_not(name: str, error: BaseException) -> str:
    module = name.rpartition(".")[0]
    if module in sys.modules:
        return _has_no(name, dir(sys.modules[module]))
    words = _one_line(error) if module else "write package.Class"
    if module and isinstance(error, ValidationError):
        words = str(error.errors()[0]["msg"]).removeprefix("Invalid python path: ")
    remedy = "install its package, or run where its file lies (in this folder or PYTHONPATH)"
    return f"{words}\n    {remedy}"


def _has_no(name: str, there: Sequence[str]) -> str:
    module, _, last = name.rpartition(".")
    near = difflib.get_close_matches(last, there, 1) or [n for n in there if n.lower() == last]
    nearest = f"\n    nearest: {module}.{near[0]}" if near else ""
    return f"{module} has no {last!r}{nearest}"


def _one_line(error: BaseException) -> str:
    """Say an error's type and its words, as far as one line goes."""
    return " ".join(reason(error).split())[:400]
