"""What a real step runs and sends, noted by a dispatch mode and around the communicators."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyperslab.comm.communicator import GroupCommunicator

MANY = 600
"""Elements from which on a call is compared: below, constants and counters have their own way."""

TRANSPORT = ("aten.copy_.default", "aten.clone.default", "aten.empty", "aten.new_empty")
"""What carrying messages takes, which depends on how they are carried."""

VIEW = "aten._unsafe_view.default"


@dataclass
class Heard:
    """Of one rank: calls by name and shapes, messages (peer, bytes), bytes of sums."""

    calls: Counter[Any] = field(default_factory=Counter)
    sends: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    receives: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    sums: list[tuple[tuple[int, ...], int]] = field(default_factory=list)


def counts(name: str, shapes: list[tuple[int, ...]]) -> bool:
    large = any(torch.Size(shape).numel() >= MANY for shape in shapes)
    return large and not name.startswith(TRANSPORT)


class Listener(TorchDispatchMode):
    """Runs every operator and notes those that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = Heard()
        self.carrying = False

    def __torch_dispatch__(  # type: ignore[no-untyped-def, override]
        self, operator, types, args=(), kwargs=None
    ):
        with torch._C.DisableTorchFunctionSubclass():
            result = operator(*args, **(kwargs or {}))
        if operator.is_view or str(operator) == VIEW or self.carrying:
            return result
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        shapes = [tuple(torch.Tensor.size(t)) for t in tensors]
        if counts(str(operator), shapes):
            self.heard.calls[str(operator), tuple(shapes)] += 1
        return result

    def __enter__(self) -> Listener:  # type: ignore[override]
        exchange = GroupCommunicator.exchange
        total = GroupCommunicator.sum_in_place

        def noted_exchange(communicator, sends, receives, what):  # type: ignore[no-untyped-def]
            self.heard.sends.append(tuple((rank, t.nbytes) for rank, t in sends))
            self.heard.receives.append(tuple((rank, t.nbytes) for rank, t in receives))
            return exchange(communicator, sends, receives, what)

        def noted_sum(communicator, x, what):  # type: ignore[no-untyped-def]
            self.heard.sums.append((communicator.ranks, x.nbytes))
            self.carrying = True
            result = total(communicator, x, what)
            self.carrying = False
            return result

        self.patches = [
            mock.patch.object(GroupCommunicator, "exchange", noted_exchange),
            mock.patch.object(GroupCommunicator, "sum_in_place", noted_sum),
        ]
        for patch in self.patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in self.patches:
            patch.stop()
