"""The grid of ranks and the communication between them, each with its adjoint."""

from hyperslab.comm.collectives import all_reduce_sum, average_gradients
from hyperslab.comm.communicator import Communicator
from hyperslab.comm.exchange import ExchangePlan, plan_exchange
from hyperslab.comm.grid import AXES, Grid, log_once
from hyperslab.comm.per_grid import per_grid
from hyperslab.comm.shared_memory.buffers import shared_buffers
from hyperslab.comm.shared_memory.channels import shared_channels
from hyperslab.comm.shared_memory.sums import Shown

__all__ = [
    "AXES",
    "Communicator",
    "ExchangePlan",
    "Grid",
    "Shown",
    "all_reduce_sum",
    "average_gradients",
    "log_once",
    "per_grid",
    "plan_exchange",
    "shared_buffers",
    "shared_channels",
]
