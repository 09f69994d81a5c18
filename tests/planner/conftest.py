from __future__ import annotations

from tests.planner.traces import traced_once

__all__ = ["traced_once"]
