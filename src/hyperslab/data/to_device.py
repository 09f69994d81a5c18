"""Moving a block to the device on a stream of its own, beside the step that is running."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hyperslab.data.batch import LocalBatch


@dataclass(frozen=True, slots=True)
class InFlight:
    """A block that is on its way; ``arrived`` is None where there is nothing to wait for."""

    block: LocalBatch
    arrived: torch.cuda.Event | None = None


class DeviceCopy:
    """Copies blocks from page-locked memory to a CUDA device; elsewhere it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, block: LocalBatch) -> InFlight:
        """Start the copy; called by the reading thread, which has no current device of its own."""
        if self.stream is None:
            return InFlight(block)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            values = block.values.to(self.device, non_blocking=True)
            pinned = block.targets.pin_memory()  # no copy if it is already
            targets = pinned.to(self.device, non_blocking=True)
            return InFlight(
                replace(block, values=values, targets=targets), self.stream.record_event()
            )

    def receive(self, in_flight: InFlight) -> LocalBatch:
        """The block, safe to use on the current stream; called by the consumer."""
        if in_flight.arrived is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(in_flight.arrived)
            # The memory was allocated on the copying stream, which may reuse it only afterwards.
            in_flight.block.values.record_stream(stream)
            in_flight.block.targets.record_stream(stream)
        return in_flight.block
