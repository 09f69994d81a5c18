"""`Source`: the one interface between a storage format and everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.data.parameters import Parameters
from hyperslab.geometry import Box

Array = NDArray[Any]


class Source(ABC):
    """Samples of one shape, each a volume that can be read box by box and a target.

    Implement `read` and `target` and set the four attributes; every rank must set them alike.
    An instance can be given to `hyperslab.open` in place of a path.

    ``names``: one per sample, unique. ``shape``: (C, D, H, W) of every volume. ``dtype``: of the
    storage, kept until the data is on the device. ``parameters``: what the P targets are.
    """

    names: Sequence[str]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parameters: Parameters

    @abstractmethod
    def read(self, sample: int, box: Box) -> Array:
        """The values of ``box``, which has the four dims of ``shape``, as an array (C, d, h, w).

        Called from a background thread, never from two threads at once by one data set.
        """

    @abstractmethod
    def target(self, sample: int) -> Array:
        """The targets (P,) of a sample."""

    def volume(self, sample: int) -> str:
        """The volume from which the sample is cut: all samples of one are in the same split."""
        return self.names[sample]

    def where(self, sample: int) -> str:
        """The words by which an error names the sample."""
        return f"sample {self.names[sample]!r}"

    def close(self) -> None:  # noqa: B027 - most sources hold nothing open
        """Let go of what is open; a later `read` opens it again."""
