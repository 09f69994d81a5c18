"""What a rank needs of memory, by what it is for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hyperslab.comm.shared_memory.channels import shared_bytes
from hyperslab.machine import Machine
from hyperslab.trace.records import Exchange, Trace


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank's memory at its highest [B]; on a GPU, that of the device.

    ``activations`` are what autograd keeps but halos, ``halos`` the pieces of other ranks'
    blocks, and gathered thin maps, that the forward pass receives. ``gradients`` are those of
    DistributedDataParallel's buckets: they are views of them, so that buckets take nothing more.
    ``workspace`` is what else lives in the fullest moment: the operands of one operator, gradients
    of activations, the optimizer's temporaries; on a CPU also a convolution's copy in another
    order. ``communication`` is this rank's part of the memory that the ranks of a node share,
    ``ahead`` the mini-batches that are read ahead, ``store`` the boxes that are kept, ``process``
    what a rank takes that holds no tensor. On a GPU these four are the host's, and none of the
    device's.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    halos: int = 0
    workspace: int = 0
    communication: int = 0
    ahead: int = 0
    store: int = 0
    process: int = 0

    @property
    def total(self) -> int:
        """All of it [B]."""
        return sum(dataclasses.astuple(self))

    def as_dict(self) -> dict[str, int]:
        """By name [B]."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What a rank holds beside its step [B], see `RankMemory`."""

    ahead: int = 0
    store: int = 0
    process: int = 0


def rank_memory(trace: Trace, machine: Machine, ranks: int, host: HostMemory) -> RankMemory:
    """Of one of so many ranks: what its trace took at its fullest moment, and what lies beside it.

    The paper's Table I counts activations alone; this is what a device has to have.
    """
    halos = min(trace.saved, _received(trace))
    kept = trace.parameters + trace.gradients + trace.optimizer_state
    step = RankMemory(
        parameters=trace.parameters,
        gradients=trace.gradients,
        optimizer_state=trace.optimizer_state,
        activations=trace.saved - halos,
        halos=halos,
        workspace=max(0, trace.peak - kept - trace.saved),
    )
    if machine.device != "cpu":
        return step
    together = min(ranks, machine.ranks_per_node)
    return dataclasses.replace(
        step,
        workspace=max(0, trace.heap - kept - trace.saved),
        communication=shared_bytes(together) // together,
        ahead=host.ahead,
        store=host.store,
        process=host.process,
    )


def _received(trace: Trace) -> int:
    """In the forward pass, from other ranks [B]."""
    return sum(
        nbytes
        for event in trace.events
        if isinstance(event, Exchange) and event.stage == "forward"
        for _, nbytes in event.receives
    )
