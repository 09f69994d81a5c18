"""Copies of local batches to the device on a stream of their own, beside the step that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hyperslab.data.batch import LocalBatch


@dataclass(frozen=True, slots=True)
class InFlight:
    """A local batch on its way; ``arrived`` is None where there is nothing to wait for."""

    batch: LocalBatch
    arrived: torch.cuda.Event | None = None


class DeviceCopy:
    """Copies what ``load`` returns from page-locked memory to a CUDA device.

    On other devices local batches stay where they are.
    """

    def __init__(self, device: torch.device, load: Callable[[int, int], LocalBatch | None]) -> None:
        self.device = device
        self.load = load
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, epoch: int, step: int) -> InFlight | None:
        """Load the local batch of a step and begin to copy it; None where there is none.

        Called by the reading thread, which has no current device of its own.
        """
        batch = self.load(epoch, step)
        if batch is None:
            return None
        if self.stream is None:
            return InFlight(batch)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            values = batch.values.to(self.device, non_blocking=True)
            pinned = batch.targets.pin_memory()  # no copy if it is already
            targets = pinned.to(self.device, non_blocking=True)
            event = self.stream.record_event()
        return InFlight(replace(batch, values=values, targets=targets), event)

    def finish(self, copy: InFlight) -> LocalBatch:
        """The local batch, safe to use on the current stream; called by the consumer."""
        if copy.arrived is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copy.arrived)
            # The memory was allocated on the copying stream, which may reuse it only afterwards.
            copy.batch.values.record_stream(stream)
            copy.batch.targets.record_stream(stream)
        return copy.batch
