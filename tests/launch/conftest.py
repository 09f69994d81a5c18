from __future__ import annotations

from tests.train.conftest import universes

__all__ = ["universes"]
