"""Arranges ranks as a grid and communicates between them, each operation with its adjoint.

A name is imported when it is first asked for: `launchers` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyperslab.util import importing_names

if TYPE_CHECKING:
    from hyperslab.comm.collectives import AllGatheredInts, all_reduce_sum, stack_ranks
    from hyperslab.comm.communicator import Communicator
    from hyperslab.comm.exchange import ExchangePlan, fetch, plan_exchange
    from hyperslab.comm.grid import Grid, log_once, per_grid
    from hyperslab.comm.launchers import AXES
    from hyperslab.comm.shared_memory import Shown, shared_buffers, shared_channels

__all__ = [
    "AXES",
    "AllGatheredInts",
    "Communicator",
    "ExchangePlan",
    "Grid",
    "Shown",
    "all_reduce_sum",
    "fetch",
    "log_once",
    "per_grid",
    "plan_exchange",
    "shared_buffers",
    "shared_channels",
    "stack_ranks",
]

__getattr__ = importing_names(__name__)
