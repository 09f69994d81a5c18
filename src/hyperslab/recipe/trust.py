"""Decides whose code a recipe may name, before any of it is imported.

A recipe that the user passes to a command is his own, and names what he likes. The recipe in a
run's folder may be anybody's, and so may be what lies beside it. So it names only

- hyperslab's own classes and those of torch that are listed here,
- what the user names on the command line: a target by its key (``model.target=...``), or the
  classes of a module that is installed (``--trust monai.networks.nets``),
- anything at all where the user has trained with the very same names and arguments on this
  machine, and the modules lie where they lay then; `remember` notes that in his state folder.

[Note: importing executes] An import of ``a.b`` runs ``a`` first, and a folder needs no
``__init__.py`` to be a package. So modules are looked for one level at a time, by what
`PathFinder` says of their files, and each level is judged before it is imported. The current
folder is no place to look for modules unless the recipe is the user's own or what it names was
trained with from there.

[Note: places] A run's recipe says no place either. The run goes on in the folder where the recipe
lies, whatever ``output`` it names, and keys of `LIBERTIES`, by which it would read or write
elsewhere, are left out where the user has neither named them nor trained with them on these data.
So are loggers of `SERVICES`, but where the user has trained in that very folder with them.
Links that lie in a run's folder are read through, as what they lead to is read with the user's own
rights, but nothing is written or deleted where they lead out of it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import json
import os
import site
import stat
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ImportString, TypeAdapter

from hyperslab.errors import RecipeError, reason
from hyperslab.formats.registry import load_plugins, look_in_current_folder
from hyperslab.util.atomic_files import write_text
from hyperslab.util.private_folders import check_private, make_private, user_folder

RUN_RECIPE = "recipe.yaml"  # the recipe in a run's folder
RUN_MARKS = ("checkpoints", "steps.csv", "epochs.csv")  # what a training leaves


def _within(name: str, root: str) -> bool:
    return name == root or name.startswith(f"{root}.")


@functools.cache
def listed() -> frozenset[str]:
    """List the constructors and losses of torch that any recipe may name; imports torch.

    They are layers, losses, optimizers and schedules, as torch documents them. None of their
    arguments is taken for code.
    """
    import torch
    from torch import nn
    from torch.optim import lr_scheduler

    found = {
        f"torch.nn.functional.{name}"
        for name in vars(nn.functional)
        if name.endswith(("_loss", "cross_entropy", "cross_entropy_with_logits", "kl_div"))
        and name[0] != "_"
    }
    for home, base, within in (
        (nn, nn.Module, "torch.nn.modules"),
        (torch.optim, torch.optim.Optimizer, "torch.optim"),
        (lr_scheduler, lr_scheduler.LRScheduler, "torch.optim"),
    ):
        for name, one in vars(home).items():
            is_class = isinstance(one, type) and issubclass(one, base)
            if is_class and _within(one.__module__, within):
                found.add(f"{home.__name__}.{name}")
    return frozenset(found)


def _is_listed(name: str) -> bool:
    return _within(name, "torch") and name in listed()


LIBERTIES = ("outside_files", "staging")
"""Keys of ``data`` by which a recipe reaches files of the user's that he has not named."""

SERVICES = ("wandb", "mlflow")
"""Loggers that send numbers away; what the current folder holds may say where to.

Weights & Biases takes the server that gets them, and the user's key, from ``wandb/settings``."""

OWN_PACKAGE = "hyperslab"
OWN_LOSSES = "hyperslab.losses"
"""The module whose functions any recipe may name; of all other modules it is classes only."""

OWN_HOMES = (
    OWN_LOSSES,
    "hyperslab.models",
    "hyperslab.formats.synthetic",
    "hyperslab.formats.views",
)
"""Modules of hyperslab whose classes any recipe may name. Others take their arguments for places
and for what was found there: sources what a scan of a folder has found, loggers where to write."""


@dataclass(frozen=True, slots=True)
class Trust:
    """Says which code may be imported for a recipe, and where its modules are looked for.

    ``own``: the recipe is the user's own. ``trained`` are names with which he has trained here, if
    all of the recipe's are; ``unknown`` is why that cannot be told. ``modules`` are those of
    ``--trust``, ``named`` the targets and plug-ins that overrides name. ``file`` is where the
    recipe is from, for errors. ``left_out`` are overrides for what it says and must not.

    All are equal: recipes are compared by what they say.
    """

    own: bool = field(default=False, compare=False)
    trained: frozenset[str] = field(default=frozenset(), compare=False)
    unknown: str = field(default="", compare=False)
    modules: tuple[str, ...] = field(default=(), compare=False)
    named: frozenset[str] = field(default=frozenset(), compare=False)
    file: str = field(default="the recipe", compare=False)
    left_out: tuple[str, ...] = field(default=(), compare=False)

    def remembers(self, values: Mapping[str, Any]) -> bool:
        """Say whether the user answers for all code in a recipe's values, so that it is noted.

        What ``--trust`` alone allows is not: arguments may name what is never made, and so has
        never been judged.
        """
        return self.own or all(self.answers_for(name) for _, name, _ in _others(values))

    @property
    def options(self) -> list[str]:
        """Return the options of a command line that trusts the same modules."""
        return [word for module in self.modules for word in ("--trust", module)]

    def answers_for(self, name: str) -> bool:
        """Say whether the user answers for what has this name, so that it may be a function."""
        return name in self.trained or name in self.named

    def imported(self, name: str, key: str) -> Any:
        """Import what has a dotted name, once all modules on the way to it are allowed.

        Raises:
            RecipeError: it is not allowed; says what would allow it. Nothing was imported.
            Exception: whatever is wrong in somebody else's module.
        """
        self.check_allowed(name, key)
        if self.own or self.answers_for(name):
            self._look_here(name)
            return TypeAdapter(ImportString).validate_python(name)
        module, _, last = name.rpartition(".")
        return getattr(importlib.import_module(module), last)

    def check_allowed(self, name: str, key: str) -> None:
        """Refuse a name that `imported` does not import; raises as that does."""
        answered = self.own or self.answers_for(name)
        if not (answered or _within(name, OWN_PACKAGE) or _is_listed(name)):
            self._check_installed(name, name.rpartition(".")[0], key)

    def load_plugins(self, modules: Sequence[str], key: str) -> None:
        """Import modules that register formats; raises as `imported`, or a `DataError`."""

        def allow(module: str) -> None:
            if self.own or self.answers_for(module):
                self._look_here(module)
            else:
                self._check_installed(module, module, key)

        load_plugins(modules, allow)

    def check_defined(self, found: Any, name: str, key: str) -> None:
        """Refuse all but classes, and those where they are not defined, for a run of anybody's.

        Functions may run what their arguments say (`torch.hub.load`, and one of torch.fx that
        compiles a text), and modules have the names of others that they import.

        Raises:
            RecipeError: it is something else, or from somewhere else.
        """
        if self.own or self.answers_for(name) or _is_listed(name):
            return
        home = str(getattr(found, "__module__", ""))
        if home == OWN_LOSSES and _within(name, home):
            return
        is_own = _within(name, OWN_PACKAGE)
        roots = OWN_HOMES if is_own else self.modules
        if not isinstance(found, type):
            wrong = f"is a {type(found).__name__}, and a run's folder may name classes only"
        elif is_own and _within(home, OWN_PACKAGE) and not any(_within(home, r) for r in roots):
            wrong = "reads or writes what its arguments say, and a run's folder names no place"
        elif not any(_within(home, root) for root in roots):
            wrong = f"is defined elsewhere, in {home}"
        elif not _is_allowed_place(home):
            wrong = "is defined outside of the installed packages"
        else:
            return
        raise RecipeError(f"{self.file}: {key} {name} {wrong}\n    {_to_name(name, key)}")

    def _check_installed(self, name: str, module: str, key: str) -> None:
        """Refuse a module that is not trusted or not installed, see [Note: importing executes]."""
        if not any(_within(module, root) for root in self.modules):
            raise RecipeError(self._refusal(name, module, key))
        for level in itertools.accumulate(module.split("."), "{}.{}".format):
            spec = find_spec(level)  # imports the level above, which was judged before
            if spec is not None and not _is_installed(_places_of(spec)):
                raise RecipeError(self._refusal(name, module, key))

    def _refusal(self, name: str, module: str, key: str) -> str:
        places = located(name)
        outside = [place for place in places if not _is_installed([place])]
        in_program = _within(name, "__main__")
        where = f" ({(outside or places)[-1]})" if places and not in_program else ""
        unknown = f" ({self.unknown})" if self.unknown else ""
        words = (
            f"{self.file}: {key} {name}{where} is not hyperslab's, and no run with it is known to "
            f"have been trained by you on this machine{unknown}\n    "
        )
        if in_program:
            return (
                f"{words}a program defines it: pass it there, as in "
                "hs.TrainedRun(RUN, model=...), or train with one from a module of its own"
            )
        path = Path(self.file)
        if path.name == RUN_RECIPE and not any(map(_is_of_run, path.absolute().parents)):
            words += f"if this file is yours, call it something else than {RUN_RECIPE}\n    "
        if places and not outside:
            return f"{words}if you trust this package, add --trust {module}"
        if not places:
            top = name.partition(".")[0]
            words += (
                f"no module {top} is found from here; if it is yours, run where it lies, or with "
                "its folder in PYTHONPATH\n    "
            )
        return words + _to_name(name, key)

    def _look_here(self, name: str) -> None:
        """Look for modules in the current folder, too; for a run only if they are nowhere else."""
        if self.own or _top_spec(name, elsewhere=True) is None:
            look_in_current_folder()


NO_TRUST = Trust()


def _to_name(name: str, key: str) -> str:
    """Return the words that say how a user answers for a name."""
    override = f"{key}=[{name}]" if key == "data.plugins" else f"{key}={name}"
    return f"if you know what it does, name it on the command line: {override}"


def trust_of(path: Path, modules: Sequence[str] = (), *, begins: bool = False) -> Trust:
    """Return the trust in a recipe by where its file lies.

    ``modules`` are those of ``--trust``. A training that ``begins`` takes any recipe for the
    user's own unless a training has left something beside it.
    """
    paths = {os.path.abspath(path), os.path.realpath(path)}
    named = not begins and any(os.path.basename(one) == RUN_RECIPE for one in paths)
    own = not named and not any(_is_of_run(folder) for one in paths for folder in Path(one).parents)
    return Trust(own=own, modules=tuple(modules), file=str(path))


def _is_of_run(folder: Path) -> bool:
    return os.path.lexists(folder / RUN_RECIPE) and any(
        os.path.lexists(folder / mark) for mark in RUN_MARKS
    )


def output_of_run(path: Path) -> Path:
    """Return where a recipe in a run's folder writes, see [Note: places].

    >>> output_of_run(Path("theirs/recipe.yaml")), output_of_run(Path("theirs/other.yaml"))
    (PosixPath('theirs'), PosixPath('theirs/other'))
    """
    return path.parent if path.name == RUN_RECIPE else path.with_suffix("")


def leave_out_liberties(
    trust: Trust, values: dict[str, Any], said: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Trust:
    """Take out of a recipe's values the `LIBERTIES` that are not the user's, and return the trust.

    ``said`` are the values that he has given himself, ``theirs`` those of the file.
    """
    if trust.own:
        return trust
    named, in_file = _liberties(said), _liberties(theirs)
    run = Path(trust.file).parent

    def taken(key: str, value: Any) -> bool:
        if named.get(key) == value:
            return True
        return in_file.get(key) == value and _is_noted(_digest_of_liberty(key, theirs, run))[0]

    refused = {key: one for key, one in _liberties(values).items() if not taken(key, one)}
    for key in refused:
        section, _, word = key.partition(".")
        if word:
            del values[section][word]
        else:
            values[section] = [one for one in values[section] if one not in SERVICES]
    words = (f"{key}={json.dumps(value, default=str)}" for key, value in refused.items())
    return replace(trust, left_out=tuple(words))


def _liberties(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what reaches further than the folder, by dotted key."""
    data = values.get("data")
    given = data if isinstance(data, Mapping) else {}
    keys = {f"data.{key}": given[key] for key in LIBERTIES if given.get(key) not in (None, False)}
    loggers = values.get("loggers")
    listed = loggers if isinstance(loggers, (list, tuple, set)) else ()
    services = [one for one in listed if one in SERVICES]
    return {**keys, "loggers": services} if services else keys


def _digest_of_liberty(key: str, values: Mapping[str, Any], run: Path) -> str:
    """Hash the liberties of a recipe, and the data or the run's folder with which it takes them."""
    words: list[Any] = ["loggers", _liberties(values).get(key), os.path.realpath(run)]
    if key != "loggers":
        keys = (*LIBERTIES, "path", "table", "train", "validation", "test")
        words = [values["data"].get(key) for key in keys]
    return hashlib.sha256(json.dumps(_in_order(words), default=str).encode()).hexdigest()


def named_code(values: Any, key: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the key and the name of all code in a recipe's values, and what it is given.

    >>> list(named_code({"loss": {"target": "a.B", "x": 1}, "data": {"plugins": ["c"]}}))
    [('loss.target', 'a.B', {'target': 'a.B', 'x': 1}), ('data.plugins', 'c', None)]
    """
    if isinstance(values, Mapping):
        for word in ("target", "python_class"):
            if isinstance(values.get(word), str):
                yield f"{key}{word}", values[word], values
        plugins = values.get("plugins") if key == "data." else None
        modules = [plugins] if isinstance(plugins, str) else plugins
        for module in modules if isinstance(modules, (list, tuple)) else ():
            yield "data.plugins", str(module), None
        for name, value in values.items():
            yield from named_code(value, f"{key}{name}.")
    elif isinstance(values, (list, tuple)):
        for place, value in enumerate(values):
            yield from named_code(value, f"{key}{place}.")


def with_memory(trust: Trust, values: Mapping[str, Any]) -> Trust:
    """Return the trust in a recipe of these values that knows what the user has trained here."""
    if trust.own or not _others(values):
        return trust
    noted, unknown = _is_noted(_digest(values))
    if not noted:
        return replace(trust, unknown=unknown)
    return replace(trust, trained=frozenset(name for _, name, _ in _others(values)))


def _is_noted(digest: str) -> tuple[bool, str]:
    """Say whether there is a note of the user's own, and why that cannot be told, if it cannot."""
    try:
        folder = _memory()
        check_private(folder)
        state = (folder / digest).lstat()
    except FileNotFoundError:
        return False, ""
    except OSError as error:
        return False, f"the record of what you have trained cannot be read: {reason(error)}"
    return stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid(), ""


def remember(values: Mapping[str, Any], trust: Trust) -> None:
    """Note that the user trains with the liberties of these values, and the code if it is his.

    Raises:
        OSError: there is no folder that belongs to him alone.
    """
    notes: dict[str, Any] = {}
    if (others := _others(values)) and trust.remembers(values):
        notes[_digest(values)] = [[key, name, *located(name)] for key, name, _ in others]
    run = Path(str(values.get("output", "")))
    for key, value in _liberties(values).items():
        notes[_digest_of_liberty(key, values, run)] = {key: value}
    if notes:
        folder = make_private(_memory())
        for name, words in notes.items():
            text = json.dumps(words, indent=1, default=str) + "\n"
            write_text(folder / name, text, concurrent=True)


def _memory() -> Path:
    return user_folder("XDG_STATE_HOME", "trained")


def _others(values: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Return the code that is not listed."""
    return [one for one in named_code(values) if not _is_listed(one[1])]


def _digest(values: Mapping[str, Any]) -> str:
    """Hash what a recipe names, with all arguments and the files where modules lie now."""
    found = sorted(
        [key, name, json.dumps(_in_order(given), default=str), *located(name)]
        for key, name, given in _others(values)
    )
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _in_order(value: Any) -> Any:
    """Return a value with the pairs of its mappings in the order of their keys, of any types."""
    if isinstance(value, Mapping):
        pairs = [[repr(key), _in_order(one)] for key, one in value.items()]
        return sorted(pairs, key=lambda pair: str(pair[0]))
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    return [_in_order(one) for one in value] if isinstance(value, (list, tuple)) else value


def located(name: str) -> tuple[str, ...]:
    """Return the files of the modules that a dotted name leads through, and import none."""
    top, *rest = name.replace(":", ".").split(".")
    if top == "__main__":
        return (os.path.realpath(getattr(sys.modules[top], "__file__", None) or "interactive"),)
    spec = _top_spec(top)
    found: list[str] = []
    while spec is not None:
        found += _places_of(spec)
        if not rest or spec.submodule_search_locations is None:
            break
        # By its last name alone: with the whole one parents would have to be there.
        spec = PathFinder.find_spec(rest.pop(0), [*spec.submodule_search_locations])
    # A folder without `__init__.py` is found once for each entry of sys.path that leads to it.
    return tuple(dict.fromkeys(map(os.path.realpath, found)))


def _top_spec(name: str, *, elsewhere: bool = False) -> ModuleSpec | None:
    """Find the first module of a dotted name; unless ``elsewhere``, in the current folder, too."""
    top = name.partition(".")[0].partition(":")[0]
    with suppress(ValueError, ImportError, FileNotFoundError):
        if (spec := find_spec(top)) is not None or elsewhere:
            return spec
        return PathFinder.find_spec(top, [os.getcwd()])
    return None


def _places_of(spec: ModuleSpec) -> list[str]:
    """Return a module's file; of a folder without ``__init__.py`` all folders that make it up."""
    if spec.has_location and spec.origin is not None:
        return [spec.origin]
    return [*(spec.submodule_search_locations or ())]


def _is_installed(places: Sequence[str]) -> bool:
    """Say whether all files lie where packages are installed."""
    return bool(places) and all(
        any(Path(place).is_relative_to(home) for home in _installed_homes())
        for place in map(os.path.abspath, places)
    )


def _is_allowed_place(module: str) -> bool:
    """Say whether a module that is imported is hyperslab's, or installed."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return _within(module, OWN_PACKAGE) or (spec is not None and _is_installed(_places_of(spec)))


def _installed_homes() -> set[str]:
    """Return the folders into which packages are installed, as they are named and as they lie."""
    names = [*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    names += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return {*names, *map(os.path.realpath, names)}
