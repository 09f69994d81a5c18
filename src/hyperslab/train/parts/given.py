"""`Given`: what a program hands to a training in place of what a recipe would name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hyperslab.formats.source import Source

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Given:
    """Objects of a program; where there is none the recipe says what is taken.

    ``optimizer`` and ``schedule`` are those of ``model``.
    """

    model: torch.nn.Module | None = None
    source: Source | None = None
    loss: LossFunction | None = None
    optimizer: torch.optim.Optimizer | None = None
    schedule: LRScheduler | None = None
    metrics: Mapping[str, LossFunction] = field(default_factory=dict)


NOTHING_GIVEN = Given()
