"""Explains why ranks ended, by one error for all of them."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hyperslab import errors
from hyperslab.util.signals import STOP_SIGNALS

LINES_QUOTED = 12  # lines of a rank's error output that an error quotes
LINES_BEFORE_DUMP = 2  # of these, what comes before the calls in which Python was ended

STOPPED_EXIT_CODES = {128 + number: number for number in STOP_SIGNALS}
"""Exit codes of a rank that wrote a checkpoint and ended because of a signal."""

RAISED_ERRORS: dict[str, type[errors.HyperslabError]] = {
    kind.__name__: kind
    for kind in (
        errors.HyperslabError,
        errors.UnsupportedOp,
        errors.LayoutError,
        errors.DataError,
        errors.RecipeError,
        errors.MachineError,
        errors.CommError,
    )
} | dict.fromkeys(("CheckpointError", "DivergedError"), errors.HyperslabError)
"""Maps the name of an error that a rank raised to the one in the process that started it."""

KILLED = {-signal.SIGKILL: "\n    SIGKILL comes from the system where memory runs out"}


@dataclass(frozen=True, slots=True)
class RankEnd:
    """Describes how the process of a rank ended.

    ``said`` is the error that it raised, as "DataError: words"; empty if it could not say.
    ``when`` it ended or said so [ns since the epoch]. ``overdue`` says why the launcher killed it,
    which is "" where it did not.
    """

    rank: int
    pid: int
    exitcode: int
    said: str = ""
    when: int = 0
    overdue: str = ""

    @property
    def kind(self) -> str:
        return self.said.partition(": ")[0]

    @property
    def words(self) -> str:
        return self.said.partition(": ")[2]

    @property
    def explained(self) -> bool:
        return self.kind in RAISED_ERRORS

    @property
    def lost_contact(self) -> bool:
        """Tell whether all that it knew is that another one did not answer."""
        return self.kind == errors.CommError.__name__


AGAIN = "run the same command again; a training goes on from its last checkpoint with --resume"


class OneRankError(errors.HyperslabError):
    """Reports the end of one rank, the others having been ended; ``rank`` is its number."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class RankLost(OneRankError, errors.CommError):
    """Reports that a rank died or hung, and none said why."""


class RankFailed(OneRankError):
    """Reports that a rank ended with an error of other code."""


def error_said(report: bytes) -> str:
    """Read what a rank raised, from what torch's `record` wrote; "" if that is not whole."""
    try:
        words = json.loads(report)["message"]["message"]
    except (ValueError, LookupError, TypeError):
        return ""
    return str(words)


def explain_failures(
    failures: Mapping[int, RankEnd], output: Mapping[int, Path]
) -> errors.HyperslabError:
    """Choose one error for all: the first rank's that failed by itself.

    What a rank said goes before a death by signal, its own or another's: it may have come after.
    """
    failed = list(failures.values())
    if all(end.exitcode in STOPPED_EXIT_CODES for end in failed):
        return stopped_error(STOPPED_EXIT_CODES[failed[0].exitcode], failures)
    cause = min(failed, key=_cause_order)
    rank = cause.rank
    quote = _quote_output(output.get(rank))
    if cause.explained:
        alone = sum(end.said.endswith(cause.words) for end in failed) == 1
        words = f"{cause.words}\n    (rank {rank})" if alone else cause.words
        return RAISED_ERRORS[cause.kind](words)
    if cause.overdue:
        heard = next((end.words for end in failed if end.lost_contact), "")
        quote = f"\n    {heard.splitlines()[0]}" if heard else ""
        return RankLost(
            rank,
            f"rank {rank} (process {cause.pid}) does not answer: {cause.overdue}; it and the "
            f"others were ended{quote}\n    {AGAIN}",
        )
    if cause.exitcode < 0:
        return RankLost(
            rank,
            f"rank {rank} (process {cause.pid}) was killed by {_signal_name(cause.exitcode)} and "
            f"the others were ended{KILLED.get(cause.exitcode, '')}\n"
            f"    {AGAIN}{quote}",
        )
    return RankFailed(rank, f"rank {rank} failed with exit code {cause.exitcode}{quote}")


def stopped_error(number: int, failures: Mapping[int, RankEnd]) -> errors.Stopped:
    """Describe the end of ranks by a signal; one that notes signals says so itself."""
    said = any(end.exitcode in STOPPED_EXIT_CODES for end in failures.values())
    return errors.Stopped(number, f"stopped by {signal.Signals(number).name}", said=said)


def _cause_order(end: RankEnd) -> tuple[bool, bool, bool, int]:
    """Rank an end by how near it is to the cause, which is lowest."""
    told_to_end = end.exitcode in STOPPED_EXIT_CODES or end.exitcode == -signal.SIGTERM
    consequence = end.lost_contact or (told_to_end and not end.explained)
    return consequence, not end.explained, bool(end.overdue), end.when


def _signal_name(exitcode: int) -> str:
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


def _quote_output(output: Path | None) -> str:
    try:
        lines = output.read_text(errors="replace").splitlines() if output else []
    except OSError:
        return ""
    # Where Python wrote its calls as it was ended, what the C library said is before them; the
    # thread that was ended is the last one, and its innermost call the first.
    dumps = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    ended = [i for i, line in enumerate(lines) if line.startswith("Current thread ")]
    if dumps and ended and ended[-1] > dumps[-1]:
        lines = [*lines[max(0, dumps[-1] - LINES_BEFORE_DUMP) : dumps[-1] + 1], *lines[ended[-1] :]]
        lines = lines[:LINES_QUOTED]
    shown = "".join(f"\n    | {line}" for line in lines[-LINES_QUOTED:])
    return f"\n    its last lines, from {output}:{shown}" if lines else ""
