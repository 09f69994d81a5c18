"""A folder of Zarr v3 groups as a `Source` (the extra `zarr`): a box is the chunks that it meets.

Each sample is a group ``{name}.zarr`` with the keys and attributes of the HDF5 layouts. Chunks that
a box meets have to be there, see `zarr_storage`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hyperslab.formats.keyed.catalog import Catalog
from hyperslab.formats.keyed.opener import KeyedOpener, Selection, StoredArray
from hyperslab.formats.keyed.source import KeyedFolder
from hyperslab.formats.keyed.zarr_storage import check_chunks
from hyperslab.formats.shared import optional
from hyperslab.formats.source import Array


class ZarrFolder(KeyedFolder):
    """Zarr v3 groups of the layouts that `header` knows."""

    suffixes = (".zarr",)

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(catalog, ZarrOpener())


class ZarrOpener(KeyedOpener):
    """Opens Zarr v3 groups; nothing stays open."""

    def read(self, array: StoredArray, selection: Selection) -> Array:
        with array.as_scanned():
            group = optional.zarr().open_group(array.path, mode="r", zarr_format=3)
            stored = array.of(group)
            check_chunks(array.path, array.key, stored, array.reach, selection)
            return self._fetch(stored, selection, np.dtype(array.dtype))

    def _fetch(self, dataset: Any, selection: Selection, dtype: np.dtype[Any]) -> Array:
        return np.asarray(dataset[selection], dtype)
