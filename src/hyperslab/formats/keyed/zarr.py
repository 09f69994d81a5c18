"""A folder of Zarr v3 groups as a `Source` (the extra `zarr`): a box is the chunks that it meets.

Each sample is a group ``{name}.zarr`` with the keys and attributes of the HDF5 layouts. The
specification lets a chunk that is all fill value be missing, so one that was lost reads as that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hyperslab.formats.keyed.source import KeyedFolder, Selection
from hyperslab.formats.shared import optional
from hyperslab.formats.source import Array


class ZarrFolder(KeyedFolder):
    """Zarr v3 groups of the layouts that `header` knows; nothing stays open."""

    suffixes = (".zarr",)

    def _file(self, name: str) -> Any:
        return optional.zarr().open_group(self.catalog.folder / name, mode="r", zarr_format=3)

    def _fetch(self, dataset: Any, selection: Selection, dtype: np.dtype[Any]) -> Array:
        return np.asarray(dataset[selection], dtype)
