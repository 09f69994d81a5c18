"""Times of the operators of traced steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hyperslab.calibrate.clock import Clock
from hyperslab.calibrate.replay import Replay
from hyperslab.comm.agreement import from_all
from hyperslab.machine import Measured, measurable_passes
from hyperslab.machine.call_text import write_call
from hyperslab.machine.setting import entry_of
from hyperslab.trace.records import Call, LocalOperator


def distinct_operators(
    operators: Iterable[LocalOperator], known: Iterable[Call] = ()
) -> list[LocalOperator]:
    """Each call once, and passes that it does together also apart, without those known already."""
    seen = set(known)
    found = []
    for operator in operators:
        for part in measurable_passes(operator):
            if part.call not in seen:
                seen.add(part.call)
                found.append(part)
    return found


def measure_operators(
    operators: Sequence[LocalOperator], clock: Clock, done: Callable[[], None]
) -> tuple[list[Measured], dict[str, str]]:
    """The time of each, and why others could not be run, by the operator's name.

    All ranks call this with the same operators; ``done`` is called after each.
    """
    entries = []
    failed = {}
    for operator in operators:
        seconds, reason = _measure(operator.call, clock)
        if reason:
            failed[operator.call.name] = reason
        else:
            entries.append(entry_of(operator, seconds))
        done()
    return entries, failed


def _measure(call: Call, clock: Clock) -> tuple[float, str]:
    """Its time [s]; or why some rank could not run it."""
    reason = ""
    try:
        write_call(call)  # or it could not be kept
        replay = Replay(call, clock.grid.device)
        replay()
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
    reasons = [found for found in from_all(reason) if found]
    if reasons:
        return 0.0, reasons[0]
    return clock.median(replay, before=replay.refresh), ""
