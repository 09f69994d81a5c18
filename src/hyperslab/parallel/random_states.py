"""Random states: what ranks that compute the same have to draw alike."""

from __future__ import annotations

import random
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist

from hyperslab.comm import Grid
from hyperslab.comm.agreement import from_main

RandomStates = Literal["replica", "own"]
RANDOM_STATES: tuple[str, ...] = get_args(RandomStates)


def share_random_states(grid: Grid, states: RandomStates) -> None:
    """Torch seeds every process differently; ranks that drop elements must draw alike.

    So must, with "replica", data sets of the ranks of a replica, which draw from NumPy's and
    Python's generators, too.
    """
    _share_torchs(grid)
    if states == "replica":
        of_numpy, of_python = from_main(lambda: (np.random.get_state(), random.getstate()))  # noqa: NPY002
        _set_states(of_numpy, of_python, grid.coords["data"])


def _share_torchs(grid: Grid) -> None:
    state = torch.get_rng_state().to(grid.device)
    dist.broadcast(state, src=0)
    torch.set_rng_state(state.cpu())
    if grid.device.type == "cuda":
        state = torch.cuda.get_rng_state(grid.device).to(grid.device)
        dist.broadcast(state, src=0)
        torch.cuda.set_rng_state(state.cpu(), grid.device)


def _set_states(of_numpy: Any, of_python: Any, replica: int) -> None:
    """Those of rank 0, and for other replicas than its own states that are seeded by them."""
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002 - the generator that data sets draw from
    if replica > 0:
        random.seed((random.getrandbits(128) << 32) + replica)
        words = np.random.randint(0, 1 << 32, 4, dtype=np.uint32)  # noqa: NPY002
        np.random.seed([*words.tolist(), replica])  # noqa: NPY002
