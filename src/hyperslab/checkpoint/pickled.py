"""Reads checkpoints of an earlier version, which torch wrote with an index that is a pickle.

Reading one runs any code that is in it, so only those get it who have asked for it.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyperslab.checkpoint.files import EXTRA_PICKLED
from hyperslab.errors import CheckpointError, reason

log = logging.getLogger("hyperslab")


def refuse_pickles(path: Path) -> CheckpointError:
    """The error for who did not ask for it."""
    return CheckpointError(
        f"the checkpoint {path} is of an earlier version, which kept pickles: reading it would "
        "run any code that is in it\n"
        "    if you trust where it comes from: checkpoint.trust_pickle=true, or "
        "hs.load(..., trust_pickle=True)"
    )


def read_pickled_extra(path: Path) -> dict[str, Any]:
    """What it holds besides model and optimizer; the log says what this means."""
    log.warning("%s is read with its pickles: code that is in it is run", path)
    extra: dict[str, Any] = torch.load(path / EXTRA_PICKLED, map_location="cpu", weights_only=True)
    return extra


def fill_from_pickled(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, failing: str
) -> None:
    """Fill model and optimizer; every rank calls it.

    Raises:
        CheckpointError: on every rank, with ``failing`` and what went wrong on the first one.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.checkpoint.state_dict_loader import load

    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process is one process
            load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        raise CheckpointError(f"{failing}: {reason(cause)} (rank {rank})") from error
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
