"""Checkpoints as earlier versions wrote them, with pickles."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save


def save_pickled(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **extra: Any,
) -> None:
    """What `hyperslab.save` did; every rank calls it."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(extra, path / "extra.pt")
        write_sums(path)


def write_sums(path: Path, **more: object) -> None:
    """A manifest that says that all is as written."""
    files = [file for file in sorted(path.iterdir()) if file.name != "manifest.json"]
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    (path / "manifest.json").write_text(json.dumps({**more, "sha256": sums}))


class Attack:
    """A pickle that makes a folder when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (str(self.mark), 0o777, True)


def attacking_pickle(mark: Path) -> bytes:
    return pickle.dumps(Attack(mark))
