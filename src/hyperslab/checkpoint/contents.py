"""The files of a checkpoint, read back: everything is compared with what it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hyperslab.checkpoint.manifest import STATE_FILE, ChecksumManifest, parse_json, read_limited
from hyperslab.checkpoint.safetensors_file import SUFFIX, read_tensors
from hyperslab.checkpoint.snapshot import EXTRA_STEM, MODEL_STEM, OPTIMIZER_STEM, STATE_LIMIT
from hyperslab.checkpoint.state import State
from hyperslab.checkpoint.values import Tensors, decode_value
from hyperslab.errors import CheckpointError, reason


def read_state(path: Path, manifest: ChecksumManifest, *, optimizer: bool) -> State:
    """The weights, and if it is asked for and there what the optimizer keeps.

    Raises:
        CheckpointError: a file cannot be read or is no such file.
    """
    values = _read_values(path)
    weights = _read(path, manifest, MODEL_STEM)
    if not optimizer or values["optimizer"] is None:
        return State(values["model"], weights)
    kept = values["optimizer"]
    groups = kept.get("param_groups")
    if not isinstance(kept.get("state"), dict) or not isinstance(groups, list):
        raise _no_state(path, "its optimizer has no groups")
    if not all(isinstance(g, dict) and _are_names(g.get("params")) for g in groups):
        raise _no_state(path, "a group of its optimizer has no weights")
    if not {"other_state", "rest"} <= kept.keys():
        raise _no_state(path, "its optimizer is not whole")
    return State(values["model"], weights, kept, _read(path, manifest, OPTIMIZER_STEM))


def read_extra_values(path: Path, manifest: ChecksumManifest) -> dict[str, Any]:
    """What was given besides; raises as `read_state`."""
    values = _read_values(path)["extra"]
    beside = _read(path, manifest, EXTRA_STEM)
    try:
        return {key: decode_value(value, beside) for key, value in values.items()}
    except (ValueError, RecursionError) as error:
        raise _no_state(path, str(error)) from None


def _read_values(path: Path) -> dict[str, dict[str, Any]]:
    try:
        values = parse_json(read_limited(path / STATE_FILE, STATE_LIMIT))
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {reason(error)}") from None
    except ValueError as error:
        raise _no_state(path, str(error)) from None
    kinds = {"model": dict, "optimizer": dict | None, "extra": dict}
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        raise _no_state(path, f"it has not {', '.join(kinds)}")
    for key, kind in kinds.items():
        if not isinstance(values[key], kind):
            raise _no_state(path, f"its {key} is no object")
    return values


def _read(path: Path, manifest: ChecksumManifest, stem: str) -> Tensors:
    """All tensors of the files of one kind."""
    found: Tensors = {}
    for name in sorted(manifest.sha256):
        if not (name.startswith((f"{stem}.", f"{stem}-")) and name.endswith(SUFFIX)):
            continue
        tensors = read_tensors(path / name)
        if twice := found.keys() & tensors.keys():
            raise CheckpointError(f"the checkpoint {path} has {min(twice)} twice")
        found |= tensors
    return found


def _are_names(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _no_state(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {path} is of nobody's making: {STATE_FILE}: {why}")
