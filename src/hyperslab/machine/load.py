"""Machine files: shipped ones by their names, others by their paths."""

from __future__ import annotations

import logging
import platform
import reprlib
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError

from hyperslab.atomic_files import write_text
from hyperslab.documents import MOST_LONG_YAML, parse_long_yaml, read_text
from hyperslab.errors import MachineError
from hyperslab.machine.schema import FORMAT, Machine

log = logging.getLogger("hyperslab")

_SHIPPED = files("hyperslab.machine") / "shipped"


def shipped_machines() -> list[str]:
    """Their names."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in _SHIPPED.iterdir()
        if entry.name.endswith(".yaml")
    )


def load_machine(name_or_path: str | Path) -> Machine:
    """A shipped machine (``laptop-2core``) or that of a YAML file.

    One that was measured with other versions than these is used with a warning that names them.

    Raises:
        MachineError: there is no such file or name, or it is malformed; names the file and the
            key.
    """
    where = str(name_or_path)
    values = _values(where)
    if values.get("format", FORMAT) != FORMAT:
        log.warning(
            "%s has format %s, this hyperslab reads format %d: its numbers may mean other things",
            where,
            values["format"],
            FORMAT,
        )
    try:
        machine = Machine.model_validate(values)
    except ValidationError as error:
        raise MachineError("\n".join(_sentences(error, where))) from None
    _compare_versions(machine, where)
    return machine


def save_machine(machine: Machine, path: Path) -> None:
    """Write it as `load_machine` reads it; it is there whole, or what was there before still is."""
    values = machine.model_dump(mode="json", exclude_none=True)
    text = yaml.dump(values, Dumper=_OneLine, sort_keys=False, width=10**6, allow_unicode=True)
    write_text(path, text)


def current_versions() -> dict[str, str]:
    """Of what a measurement depends on, here and now."""
    try:
        own = version("hyperslab")
    except PackageNotFoundError:  # run from its sources
        own = "unknown"
    return {"hyperslab": own, "torch": str(torch.__version__), "python": platform.python_version()}


class _OneLine(yaml.SafeDumper):
    """A mapping of plain values on one line."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
        node = super().represent_mapping(tag, mapping, flow_style)
        scalars = all(isinstance(value, yaml.ScalarNode) for _, value in node.value)
        node.flow_style = scalars and bool(node.value) and len(self.represented_objects) > 1
        return node


def _values(where: str) -> dict[str, Any]:
    shipped = where in shipped_machines()
    try:
        own = _SHIPPED / f"{where}.yaml"
        text = own.read_text() if shipped else read_text(Path(where), MOST_LONG_YAML)
        values = parse_long_yaml(text)
    except FileNotFoundError:
        raise MachineError(
            f"there is no machine file {where}\n    give the path of a file that `hyperslab "
            f"calibrate` wrote, or a shipped machine: {', '.join(shipped_machines())}"
        ) from None
    except OSError as error:
        raise MachineError(f"cannot read the machine file {where}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise MachineError(f"the machine file {where} is no YAML: {error}") from None
    if not isinstance(values, dict):
        raise MachineError(f"{where} holds no `key: value` lines, so it is no machine file")
    return values


def _sentences(error: ValidationError, where: str) -> list[str]:
    lines = []
    keys = [problem["loc"] for problem in error.errors(include_url=False)]
    for problem in error.errors(include_url=False):
        if any(problem["loc"] == key[: len(problem["loc"])] != key for key in keys):
            continue  # it follows from what is wrong inside
        key = ".".join(map(str, problem["loc"]))
        if problem["type"] == "missing":
            lines.append(f"{where}: {key!r} is missing")
        elif problem["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown key {key!r}")
        elif not key:
            lines.append(f"{where}: {problem['msg'].removeprefix('Value error, ')}")
        else:
            what = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{where}: bad value {reprlib.repr(problem['input'])} for {key!r}: {what}")
    return lines


def _compare_versions(machine: Machine, where: str) -> None:
    here = current_versions()
    pairs = [
        f"{name} {was} (here {here[name]})"
        for name, was in machine.versions.items()
        if name in here and not same_minor(was, here[name])
    ]
    if pairs and machine.measured:
        log.warning(
            "the machine file %s was measured with %s\n    measure again: hyperslab calibrate",
            where,
            ", ".join(pairs),
        )


def same_minor(a: str, b: str) -> bool:
    """Whether two versions differ in their patches at most, which do not change kernels."""
    first, second = (number.split("+")[0].split(".")[:2] for number in (a, b))
    return first == second
