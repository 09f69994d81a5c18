"""Plans runs before they start, from a traced step and the description of a machine.

`job` is what a recipe asks of any grid, `search` finds the best grid, `auto` takes it for a recipe
that says `grid: auto`, `summary` shows a plan. `trace` runs the step of one rank without memory and
writes `records`, `machine` says how long each takes, by its `calls`, `cost` sums them up to seconds
and bytes. `calibrate` measures a machine, by `timing`.
"""

from __future__ import annotations

import re
import tempfile
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from hyperslab.errors import MachineError
from hyperslab.util.documents import MOST_LONG_YAML_CHARACTERS, parse_long_yaml, read_text

_SHIPPED = files("hyperslab.planner") / "machines"


def shipped_machines() -> list[str]:
    """Lists the names of the shipped machines."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in _SHIPPED.iterdir()
        if entry.name.endswith(".yaml")
    )


def check_machine(name: str | None) -> None:
    """Refuses, without torch, what is no shipped machine and no file of one (`MachineError`)."""
    if name is None or name in shipped_machines():
        return
    with suppress(OSError, UnicodeDecodeError):
        # A long file takes half a second to parse, and is parsed later.
        text = read_text(Path(name), MOST_LONG_YAML_CHARACTERS)
        if re.search("^settings:", text, re.MULTILINE):
            return
    if "settings" not in read_machine(name):
        raise MachineError(f"{name}: 'settings' is missing, so it is not a machine file")


def check_machine_file(option: str, out: Path) -> None:
    """Refuses a machine file that cannot be written, or is there and is none (`MachineError`)."""
    refusal = f"cannot write {option} {out}"
    if out.is_dir():
        raise MachineError(f"{refusal}: it is a folder\n    give a file")
    try:
        tempfile.TemporaryFile(dir=out.absolute().parent).close()
    except OSError as error:
        raise MachineError(
            f"{refusal}: {error.strerror}\n    give a file in a folder that is there"
        ) from None
    if out.is_file():
        read_machine(str(out))


def read_machine(where: str) -> dict[str, Any]:
    """Reads the keys and values of a shipped machine, or of a file (`MachineError`)."""
    shipped = where in shipped_machines()
    try:
        own = _SHIPPED / f"{where}.yaml"
        text = own.read_text() if shipped else read_text(Path(where), MOST_LONG_YAML_CHARACTERS)
        values = parse_long_yaml(text)
    except FileNotFoundError:
        raise MachineError(
            f"there is no machine file {where}\n    give the path of a file that `hyperslab "
            f"calibrate` wrote, or a shipped machine: {', '.join(shipped_machines())}"
        ) from None
    except OSError as error:
        raise MachineError(f"cannot read the machine file {where}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise MachineError(f"the machine file {where} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise MachineError(f"{where} holds no `key: value` lines, so it is not a machine file")
    return values
