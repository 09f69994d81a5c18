"""`Source`: the one interface between a storage format and everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.formats.parameters import Parameters
from hyperslab.geometry import Box

Array = NDArray[Any]


class Source(ABC):
    """Samples of one shape, each a volume that can be read box by box and what is to be found.

    That is P numbers (implement `target`) or, where ``classes`` has their names, a class for every
    voxel (implement `labels`). Implement `read` too and set the attributes; every rank must set
    them alike. An instance can be given to `hyperslab.open` in place of a path.

    ``names``: one per sample, unique. ``shape``: (C, D, H, W) of every volume. ``dtype``: of the
    storage, kept until the data is on the device. ``parameters``: what the P targets are, none
    where voxels have classes. ``classes``: their names, the background's first. ``label_bytes``:
    stored for the label of one voxel [B]. ``collective``: the ranks of a replica read together, so
    nothing is read in the background. ``volumes``: of samples that are parts of one, by name.
    """

    names: Sequence[str]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parameters: Parameters = Parameters.normalised(())
    classes: tuple[str, ...] = ()
    label_bytes: int = 1
    collective: bool = False
    volumes: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def read(self, sample: int, box: Box) -> Array:
        """The values of ``box``, which has the four dims of ``shape``, as an array (C, d, h, w).

        Called from a background thread, never from two threads at once by one data set. An error
        that is a `DataError`, OSError or EOFError is one of the sample, which may then be skipped.
        """

    def target(self, sample: int) -> Array:
        """The targets (P,) of a sample."""
        raise NotImplementedError(f"{type(self).__name__} has neither targets nor classes")

    def labels(self, sample: int, box: Box) -> Array:
        """The class of every voxel of ``box``, which has three dims, as uint8 (d, h, w).

        Called as `read` is.
        """
        raise NotImplementedError(f"{type(self).__name__} has classes but no labels")

    def volume(self, sample: int) -> str:
        """The volume from which the sample is cut: all samples of one are in the same split."""
        name = self.names[sample]
        return self.volumes.get(name, name)

    def where(self, sample: int) -> str:
        """The words by which an error names the sample."""
        return f"sample {self.names[sample]!r}"

    def close(self) -> None:  # noqa: B027 - most sources hold nothing open
        """Let go of what is open; a later `read` opens it again."""
