"""Messages that travel beside the work, on a simulated clock.

The paper takes for granted that work hides all that it can: ``max(Comp, SR)`` of a layer,
``max(sum(BD + BF), sum(AR))`` of the gradients (Oyama et al. 2020, section III-C). Here a machine
says which share of that really hides.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Lane:
    """Messages of one kind, one after the other; ``hidden`` of what work could hide is hidden.

    ``hidden`` is (blocking - actual) / (blocking - without communication): 1 gives the paper's
    maxima, 0 the sums of work and messages.
    """

    hidden: float
    free: float = 0.0  # when the lane is [s]

    def send(self, now: float, seconds: float) -> float:
        """Begin a message of so many seconds as soon as the lane is free; when it arrives [s]."""
        self.free = max(now, self.free) + seconds
        return self.free

    def exposed(self, now: float, arrival: float, seconds: float) -> float:
        """What of a message of ``seconds`` that arrives at ``arrival`` is waited for [s].

        >>> Lane(hidden=1.0).exposed(now=5.0, arrival=4.0, seconds=3.0)
        0.0
        >>> Lane(hidden=1.0).exposed(now=5.0, arrival=7.0, seconds=3.0)
        2.0
        >>> Lane(hidden=0.0).exposed(now=5.0, arrival=4.0, seconds=3.0)
        3.0
        """
        waited = max(0.0, arrival - now)
        return waited + (1 - self.hidden) * max(0.0, seconds - waited)
