"""`RunEvents`: what happens in a run, told to whoever keeps a log of it."""

from __future__ import annotations

from collections.abc import Mapping


class RunEvents:
    """Told on the main rank when something begins or ends; by itself it does nothing with it."""

    def data_opened(self, train: int, validation: int) -> None:
        """So many samples to train on in an epoch, and to validate on."""

    def epoch_begins(self, epoch: int) -> None:
        """Epochs are counted from 0."""

    def validation_begins(self, epoch: int) -> None: ...

    def validation_ends(self, epoch: int, measured: Mapping[str, float | None]) -> None: ...

    def epoch_ends(self, epoch: int) -> None: ...

    def run_ends(self, *, success: bool) -> None:
        """Success: the goal of the recipe was reached, or it had none and all epochs are done."""
