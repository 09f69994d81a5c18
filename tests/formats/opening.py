"""Opening a folder in few words."""

from __future__ import annotations

import os
from typing import Any

from hyperslab.comm import Grid
from hyperslab.formats.files import STRICT, AccessPolicy, DataMap, Refuse
from hyperslab.formats.registry import sources_of
from hyperslab.formats.source import ScanOptions, Source
from hyperslab.formats.storage_order import Channels


def source_of(
    path: str | os.PathLike[str],
    grid: Grid,
    channels: Channels | None = None,
    format: str | None = None,
    refuse: Refuse | None = None,
    driver: Any = None,
    allowed: AccessPolicy = STRICT,
    mapping: DataMap | None = None,
) -> Source:
    options = ScanOptions(channels, format, refuse, allowed, mapping)
    return sources_of([path], grid, options, driver)
