"""What a tensor carries through a network beside its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from hyperslab.tensor.gradient_homes import GradientHomes


class Scope:
    """A module's forward: open while it runs, and in backward passes, which may repeat parts."""

    def __init__(self) -> None:
        self._running = 0

    @property
    def is_open(self) -> bool:
        return self._running > 0 or torch._C._current_graph_task_id() != -1

    @contextmanager
    def running(self) -> Iterator[None]:
        """The forward runs within it."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


@dataclass(frozen=True, slots=True)
class Policy:
    """Choices that travel with a tensor through a network.

    ``batch_norm``: statistics over the whole ``"grid"`` (the serial result) or per ``"replica"``.
    ``kernels``: those of convolutions by measurement, by a fixed rule, or as torch chooses.
    ``scope``: while it is open ranks share the filters of large layers that are not cut, instead
    of repeating each other's work. Then all ranks must call such a layer, as inside a parallelised
    module; elsewhere a tensor that is not cut needs no message.
    ``homes``: where the gradients of the module's parameters are averaged.
    """

    batch_norm: str = "grid"
    kernels: Literal["measure", "fixed", "torch"] = "measure"
    scope: Scope | None = field(default=None, compare=False)
    homes: GradientHomes | None = field(default=None, compare=False)
