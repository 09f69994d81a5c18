"""Skipping samples: all ranks leave out what any rank cannot read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from hyperslab.comm.host import BoxTransport
from hyperslab.formats.source import Source

log = logging.getLogger("hyperslab")

Reasons = dict[int, str]
"""By sample, why this rank cannot read it."""


class Skipped:
    """The samples that are left out, from the step on at which they could not be read."""

    def __init__(self, source: Source, transport: BoxTransport | None) -> None:
        self.source = source
        self.transport = transport
        self.samples: set[int] = set()

    def agree(self, samples: Sequence[int], attempt: Callable[[list[int]], Reasons]) -> list[int]:
        """Those of ``samples`` that all ranks can read.

        ``attempt`` reads what this rank has to of a mini-batch. When a sample is left out the
        others move up, to other ranks too, which then have to read them: so it is done again.

        Distribution scheme: 1. each rank attempts; 2. the union of all ranks' reasons.
        """
        while True:
            left = [sample for sample in samples if sample not in self.samples]
            reasons = attempt(left)
            if self.transport is not None and self.transport.any(bool(reasons)):
                reasons = {k: v for part in self.transport.gather(reasons) for k, v in part.items()}
            if not reasons:
                return left
            for sample, reason in reasons.items():
                self.samples.add(sample)
                if self.transport is None or self.transport.rank == 0:
                    name = self.source.names[sample]
                    log.warning("sample %r is left out from here on: %s", name, reason)
