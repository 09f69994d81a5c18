"""Times of the operators of traced steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hyperslab.calibrate.clock import Clock
from hyperslab.calibrate.replay import Replay
from hyperslab.comm.agreement import from_all
from hyperslab.machine import Measured, measurable_passes
from hyperslab.machine.call_text import write_call
from hyperslab.machine.setting import entry_of
from hyperslab.trace.records import Call, LocalOperator

TO_LIBRARY = "aten.to_mkldnn.default"


@dataclass(frozen=True, slots=True)
class Wanted:
    """An operator to be timed; ``library``: its operand had been handed to oneDNN by name.

    A trace shows that as an operator of its own, which comes right before.
    """

    operator: LocalOperator
    library: bool = False


def distinct_operators(
    operators: Iterable[LocalOperator], known: Iterable[Call] = ()
) -> list[Wanted]:
    """Each call once, and passes that it does together also apart, without those known already.

    ``operators`` are in the order of their trace.
    """
    seen = set(known)
    found = []
    before = ""
    for operator in operators:
        for part in measurable_passes(operator):
            if part.call not in seen:
                seen.add(part.call)
                found.append(Wanted(part, before == TO_LIBRARY))
        before = operator.call.name
    return found


def measure_operators(
    wanted: Sequence[Wanted], clock: Clock, done: Callable[[], None]
) -> tuple[list[Measured], dict[str, str]]:
    """The time of each, and why others could not be run, by the operator's name.

    All ranks call this with the same operators; ``done`` is called after each.
    """
    entries = []
    failed = {}
    for each in wanted:
        seconds, reason = _measure(each, clock)
        if reason:
            failed[each.operator.call.name] = reason
        else:
            entries.append(entry_of(each.operator, seconds))
        done()
    return entries, failed


def _measure(wanted: Wanted, clock: Clock) -> tuple[float, str]:
    """Its time [s]; or why some rank could not run it."""
    call = wanted.operator.call
    reason = ""
    try:
        write_call(call)  # or it could not be kept
        replay = Replay(call, clock.grid.device, library=wanted.library)
        replay()
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
    reasons = [found for found in from_all(reason) if found]
    if reasons:
        return 0.0, reasons[0]
    return clock.seconds(replay, before=replay.refresh), ""
