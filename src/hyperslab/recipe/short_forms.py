"""Short forms: the names that sections leave out, and torch's own classes by their names alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

A_TARGET = "target"
"""The name of a section that has a target."""

DEFAULT_NAMES = {"model": "cosmoflow", "optimizer": "adam", "optimizer.schedule": "linear"}
"""Sections with alternatives, and the one that goes without saying."""


def _by_name(module: Any, base: type, without: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, one in vars(module).items():
        if isinstance(one, type) and issubclass(one, base) and one is not base and name[0] != "_":
            found.setdefault(name.lower(), f"{module.__name__}.{name}")
    return {name: path for name, path in found.items() if name != without}


TORCH: Mapping[str, Mapping[str, str]] = {
    "optimizer": _by_name(torch.optim, torch.optim.Optimizer),
    "optimizer.schedule": _by_name(lr_scheduler, lr_scheduler.LRScheduler, "_lrscheduler"),
}
"""By section: the dotted names of torch's classes by their own names in small letters."""


def write_out(values: dict[str, Any]) -> None:
    """Put the names into sections that leave them out; a name of torch's becomes a target."""
    for key, name in DEFAULT_NAMES.items():
        section = _section(values, key)
        if section is None:
            continue
        given = section.get("name")
        of_torch = TORCH.get(key, {}).get(str(given).lower())
        if given not in _OWN.get(key, ()) and of_torch and not section.get(A_TARGET):
            section[A_TARGET] = of_torch
            section["name"] = A_TARGET
        section.setdefault("name", A_TARGET if section.get(A_TARGET) else name)


_OWN = {"optimizer": ("adam", "sgd")}
"""Names that are ours where torch has them, too."""


def _section(values: Any, key: str) -> dict[str, Any] | None:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else None
