"""What a logger is, and what becomes of one that fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

log = logging.getLogger("hyperslab")


class ScalarLog(Protocol):
    """Takes numbers by name; whatever it raises switches it off."""

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Numbers of a step, counted from 1."""

    def flush(self) -> None:
        """At the end of an epoch."""

    def close(self) -> None:
        """At the end of the run, or of this part of it."""


class GuardedLog:
    """A logger that may fail: then one warning is logged, and the run goes on without it."""

    def __init__(self, name: str, guarded: ScalarLog) -> None:
        self.name = name
        self._log: ScalarLog | None = guarded

    def add(self, values: Mapping[str, float], step: int) -> None:
        if self._log is not None:
            with self._guarding():
                self._log.add(values, step)

    def flush(self) -> None:
        if self._log is not None:
            with self._guarding():
                self._log.flush()

    def close(self) -> None:
        if self._log is not None:
            with self._guarding():
                self._log.close()

    @contextmanager
    def _guarding(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a logger raises
            self._log = None
            warn_of(self.name, error)


def warn_of(name: str, error: Exception) -> None:
    """Say once why a logger gets nothing more."""
    words = next(iter(str(error).strip().splitlines()), "") or "no reason given"
    log.warning(
        "logger %s failed and is off from here on (%s: %s); steps.csv and epochs.csv go on",
        *(name, type(error).__name__, words),
    )
