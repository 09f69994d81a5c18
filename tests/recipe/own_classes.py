"""Classes and functions that recipes of tests name: a stranger's, some of them no good."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hyperslab.formats.source import Source
from hyperslab.geometry import Box

CALLED: list[str] = []
"""What was called that must not be."""


class Net(nn.Module):
    """From volumes to numbers, of any extents."""

    def __init__(self, channels: int, outputs: int, *, width: int = 4, slope: float = 0.1) -> None:
        super().__init__()
        if width > 1000:
            raise ValueError("far too\nwide")
        self.body = nn.Sequential(nn.Conv3d(channels, width, 3, padding=1), nn.LeakyReLU(slope))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3, 4)))


class Leaves(nn.Module):
    """Ends the program."""

    def __init__(self) -> None:
        raise SystemExit(3)


class Blobs(Source):
    """Noise whose mean is the target."""

    def __init__(self, count: int, width: int = 8) -> None:
        self.names = [f"blob-{i:02}" for i in range(count)]
        self.shape = (1, width, width, width)
        self.dtype = np.dtype(np.float32)

    def read(self, sample: int, box: Box) -> NDArray[Any]:
        random = np.random.default_rng(sample)
        whole = (random.random(self.shape) + self.target(sample)[0]).astype(np.float32)
        return whole[box.slices()]

    def target(self, sample: int) -> NDArray[Any]:
        return np.array([sample / len(self.names)])


class Wrapped(nn.Module):
    """A loss around another one, with weights."""

    def __init__(self, loss: nn.Module, weight: torch.Tensor | None = None) -> None:
        super().__init__()
        self.loss = loss
        self.weight = weight

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(prediction, target)


def network(channels: int, outputs: int) -> nn.Module:
    """A function that says what it returns."""
    return Net(channels, outputs)


def silent(*args: Any, **options: Any):  # type: ignore[no-untyped-def]
    """A function that says nothing."""
    CALLED.append("silent")
    return Net(1, 1)


def scaled_error(prediction: torch.Tensor, target: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * (prediction - target).square().mean()
