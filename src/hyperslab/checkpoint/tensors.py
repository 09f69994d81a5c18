"""The tensors of a checkpoint: every rank writes and reads its part of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hyperslab.errors import CheckpointError, reason

Optimizer = torch.optim.Optimizer | None


def write_tensors(path: Path, model: torch.nn.Module, optimizer: Optimizer, failing: str) -> None:
    """Write into a folder; the ranks share the work of what they all have.

    Raises:
        CheckpointError: on every rank, with ``failing`` and what went wrong on the first one.
    """
    _on_all_ranks(save, _state(model, optimizer), path, failing)


def read_tensors(path: Path, model: torch.nn.Module, optimizer: Optimizer, failing: str) -> None:
    """Fill model and optimizer from a folder that any number of ranks wrote; raises alike."""
    state = _state(model, optimizer)
    _on_all_ranks(load, state, path, failing)
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _state(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """By the names of the state dict, which do not depend on the grid."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def _on_all_ranks(
    function: Callable[..., Any], state: dict[str, Any], path: Path, failing: str
) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process is one process
            function(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        raise CheckpointError(f"{failing}: {reason(cause)} (rank {rank})") from error
