"""Describes a machine: how long an operator, a message, a sum or a read takes on it.

machine = load_machine("laptop-2core")       # shipped, or the path of a YAML file
setting = machine.setting(ranks=2)           # so many ranks at once share the node's memory
setting.estimate(operator)                   # -> Estimate(seconds, how), of a LocalOperator
setting.estimate_pass(operator, "backward-data")    # of a convolution's backward, alone
machine.link(0, 5)                           # -> "device", "node" or "network"
machine.message_seconds(nbytes, link)        # SR of Oyama et al. 2020
machine.send_seconds(nbytes, 0, 5)           # the same, of ranks that share their node's way out
machine.all_reduce_seconds(nbytes, ranks)    # AR
machine.sum_seconds(nbytes, (0, 4, 8))       # the same, of these ranks
machine.read_seconds(nbytes_of_each, ranks)
machine.hidden.halos                         # the share of a halo's time that work hides
setting.overhead.operator, .step             # [s] of Python and launch, beside the operators
"""

from hyperslab.planner.machine.operator_times import (
    Measured,
    Overhead,
    Setting,
    measurable_passes,
    only_pass,
)
from hyperslab.planner.machine.schema import Machine, load_machine, save_machine, shipped_machines

__all__ = [
    "Machine",
    "Measured",
    "Overhead",
    "Setting",
    "load_machine",
    "measurable_passes",
    "only_pass",
    "save_machine",
    "shipped_machines",
]
