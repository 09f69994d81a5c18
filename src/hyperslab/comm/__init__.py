"""The grid of ranks and the communication between them, each with its adjoint."""

from hyperslab.comm.exchange import Pending, Plan, plan_exchange
from hyperslab.comm.grid import AXES, Grid
from hyperslab.comm.reduce import all_reduce_sum, average_gradients
from hyperslab.comm.shared import shared_memory

__all__ = [
    "AXES",
    "Grid",
    "Pending",
    "Plan",
    "all_reduce_sum",
    "average_gradients",
    "plan_exchange",
    "shared_memory",
]
