"""Records what one rank does in a training step: operators, messages, sums, and what it keeps.

A *trace* is the list of these events in the order in which the rank begins each. A *call* is
one torch operator with the shapes, strides and types of its tensors: enough to run it again.
Machines, costs and calibration read traces and import nothing else from here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hyperslab.train.profile import Stage

if TYPE_CHECKING:
    import torch

Pass = Literal["forward", "backward-data", "backward-filter"]
"""Names FP, BD and BF of Oyama et al. 2020, section III-C."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describes a tensor without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def channels_last(self) -> bool:
        """Tells if the channels of a place lie beside each other, as convolutions can have them."""
        return len(self.shape) > 3 and self.shape[1] > 1 and self.strides[1] == 1


@dataclass(frozen=True, slots=True)
class Call:
    """Describes a torch operator's call; tensors are `TensorSpec`, lists are tuples.

    ``name`` is that of the overload: ``aten.convolution.default``. Two calls that are equal take
    the same time.
    """

    name: str
    arguments: tuple[object, ...]
    options: tuple[tuple[str, object], ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors())

    def tensors(self) -> Iterator[TensorSpec]:
        """Finds the tensors among the call's arguments."""
        pending = [*self.arguments, *(value for _, value in self.options)]
        while pending:
            value = pending.pop(0)
            if isinstance(value, TensorSpec):
                yield value
            elif isinstance(value, tuple):
                pending[:0] = value


@dataclass(frozen=True, slots=True)
class LocalOperator:
    """Records a call on this rank's block.

    ``layer`` is the submodule that called it, by its name, or "" outside; ``flops`` are those of
    each pass that it does (a convolution's backward may do two); ``read`` and ``written`` [B] are
    what its tensors hold.
    """

    call: Call
    layer: str
    stage: Stage
    flops: tuple[tuple[Pass, int], ...]
    read: int
    written: int

    @property
    def total_flops(self) -> int:
        return sum(count for _, count in self.flops)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Records messages that begin to travel to and from other ranks: pairs of rank and bytes."""

    layer: str
    stage: Stage
    what: str
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]

    @property
    def by_peer(self) -> dict[int, int]:
        """Returns the bytes to each peer, or from it if they are more: both travel at once."""
        sent, received = Counter[int](), Counter[int]()
        for total, messages in ((sent, self.sends), (received, self.receives)):
            for peer, nbytes in messages:
                total[peer] += nbytes
        return {peer: max(sent[peer], received[peer]) for peer in sorted({*sent, *received})}


@dataclass(frozen=True, slots=True)
class Wait:
    """Records that the rank goes on when an exchange has arrived."""

    exchange: Exchange


@dataclass(frozen=True, slots=True)
class Sum:
    """Records an all-reduce; the rank waits for it, unless it is one of gradients.

    Gradients travel in buckets meanwhile, and the optimizer waits for all of them; ``rounded`` of
    their bytes are half as many between machines.
    """

    layer: str
    stage: Stage
    what: str
    purpose: Literal["statistics", "gradients"]
    ranks: tuple[int, ...]
    nbytes: int
    rounded: int = 0


@dataclass(frozen=True, slots=True)
class Offload:
    """Records an activation that leaves for a file or a GPU's host, or returns; the rank waits."""

    layer: str
    stage: Stage
    nbytes: int


Event = LocalOperator | Exchange | Wait | Sum | Offload


@dataclass(slots=True)
class Trace:
    """Holds the events of one rank's step, and the memory that it takes.

    ``saved`` [B] is what autograd keeps between forward and backward, each storage once, without
    parameters; ``parameters``, ``gradients`` and ``optimizer_state`` [B] are this rank's;
    ``peak`` [B] is the most that all tensors took at a time, those three included, and ``heap`` [B]
    how far the C library's heap grows for them, see `hyperslab.planner.unbacked_memory`;
    ``not_traced`` names operators without a meta form, and how often they were called; ``notes``
    is what the rules log: where a map became too thin and was gathered, say.
    """

    rank: int
    events: list[Event] = field(default_factory=list)
    saved: int = 0
    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    peak: int = 0
    heap: int = 0
    not_traced: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def operators(self) -> list[LocalOperator]:
        return [event for event in self.events if isinstance(event, LocalOperator)]

    def flops(self, *passes: Pass) -> int:
        """Sums the flops of these passes; of all without any."""
        return sum(
            count
            for operator in self.operators
            for name, count in operator.flops
            if not passes or name in passes
        )
