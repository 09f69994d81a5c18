"""The grid of ranks and the communication between them, each with its adjoint."""

from hyperslab.comm.collectives import all_reduce_sum, average_gradients
from hyperslab.comm.exchange import Pending, Plan, plan_exchange
from hyperslab.comm.grid import AXES, Grid
from hyperslab.comm.shared_memory.channels import shared_channels

__all__ = [
    "AXES",
    "Grid",
    "Pending",
    "Plan",
    "all_reduce_sum",
    "average_gradients",
    "plan_exchange",
    "shared_channels",
]
