"""Why ranks ended: the one error that is shown (tier: no process)."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from hyperslab import errors
from hyperslab.errors import CommError, DataError, HyperslabError, Stopped
from hyperslab.launch.failures import (
    RAISED_ERRORS,
    RankEnd,
    RankFailed,
    RankLost,
    error_said,
    explain_failures,
)


def explain(*ends: RankEnd, output: dict[int, Path] | None = None) -> HyperslabError:
    return explain_failures({end.rank: end for end in ends}, output or {})


def failure(rank: int, exitcode: int, said: str = "", when: int = 0, overdue: str = "") -> RankEnd:
    return RankEnd(rank, 100 + rank, exitcode, said, when, overdue)


def test_every_error_of_the_package_comes_back_as_what_it_is() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    named = {kind.__name__ for kind in kinds if issubclass(kind, HyperslabError)}
    assert named - {*RAISED_ERRORS} == {"Stopped"}


def test_a_killed_rank_is_the_cause_although_others_failed_earlier(tmp_path: Path) -> None:
    output = tmp_path / "stderr.log"
    output.write_text("".join(f"line {i}\n" for i in range(50)))
    error = explain(
        failure(0, 1, "CommError: rank 0 lost another rank", when=1),
        failure(1, -signal.SIGKILL, when=5),
        failure(2, -signal.SIGTERM, when=2),
        failure(3, 128 + signal.SIGTERM, when=3),
        output={1: output},
    )
    assert isinstance(error, CommError)
    assert str(error).startswith("rank 1 (process 101) was killed by SIGKILL")
    assert "--resume" in str(error)
    assert "| line 49" in str(error)
    assert "| line 30" not in str(error)


def test_a_rank_that_the_c_library_ended_quotes_its_words_and_the_innermost_calls(
    tmp_path: Path,
) -> None:
    output = tmp_path / "stderr.log"
    before = [f"step {i}" for i in range(20)] + ["double free or corruption"]
    calls = [f'  File "deep.py", line {i}' for i in range(40)]
    other = ["Thread 0x2:", *(f'  File "reader.py", line {i}' for i in range(20)), ""]
    dump = ["Fatal Python error: Aborted", "", *other, "Current thread 0x1:", *calls]
    output.write_text("\n".join(before + dump))
    error = str(explain(failure(0, -signal.SIGABRT), output={0: output}))
    assert "| double free or corruption\n" in error
    assert 'deep.py", line 0\n' in error
    assert 'deep.py", line 39' not in error
    assert "reader.py" not in error
    assert len(error.splitlines()) < 20


def test_what_a_rank_raised_comes_back_as_it_was() -> None:
    error = explain(
        failure(0, 1, "CommError: rank 0 lost another rank", when=5),
        failure(1, 1, "DataError: a.hdf5: truncated", when=6),
    )
    assert type(error) is DataError
    assert str(error) == "a.hdf5: truncated\n    (rank 1)"


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGTERM])
def test_what_a_rank_raised_goes_before_its_or_another_ranks_death(number: int) -> None:
    said = failure(1, -number, "CheckpointError: no space", when=9)
    error = explain(failure(0, -signal.SIGSEGV), said)
    assert type(error) is HyperslabError
    assert str(error) == "no space\n    (rank 1)"


def test_what_all_ranks_say_is_said_once_and_of_no_rank() -> None:
    words = "DataError: nowhere: does not exist"
    error = explain(*(failure(rank, 1, words, 5) for rank in range(3)))
    assert str(error) == "nowhere: does not exist"


def test_a_bug_quotes_its_traceback(tmp_path: Path) -> None:
    output = tmp_path / "stderr.log"
    output.write_text("Traceback ...\nKeyError: 'x'\n")
    error = explain(failure(1, 1, "KeyError: 'x'"), output={1: output})
    assert type(error) is RankFailed
    assert "rank 1 failed with exit code 1" in str(error)
    assert "| KeyError: 'x'" in str(error)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_ranks_that_stopped_in_order_are_no_failure(number: int) -> None:
    error = explain(*(failure(rank, 128 + number) for rank in range(2)))
    assert isinstance(error, Stopped)
    assert error.code == 128 + number


def test_a_rank_that_does_not_answer_is_named_with_what_the_others_saw() -> None:
    error = explain(
        failure(
            0, 1, "CommError: rank 0 lost contact with rank 1 during conv3d: no answer", when=1
        ),
        failure(1, -signal.SIGKILL, when=9, overdue="it is stopped"),
    )
    assert isinstance(error, RankLost)
    assert error.rank == 1
    assert "rank 1 (process 101) does not answer: it is stopped" in str(error)
    assert "lost contact with rank 1 during conv3d" in str(error)


def test_a_rank_that_died_by_itself_goes_before_one_that_did_not_end_then() -> None:
    error = explain(
        failure(0, -signal.SIGKILL, when=9, overdue="it did not end"),
        failure(2, -signal.SIGBUS, when=5),
    )
    assert isinstance(error, RankLost)
    assert str(error).startswith("rank 2 (process 102) was killed by SIGBUS")


WHOLE = json.dumps({"message": {"message": "DataError: bad", "extraInfo": {}}}).encode()


@pytest.mark.parametrize(
    "report", [b"", WHOLE[:-5], b"[]", b"3", b'{"message": "words"}', b"\xff\xfe{"]
)
def test_a_report_that_is_not_whole_says_nothing(report: bytes) -> None:
    assert error_said(WHOLE) == "DataError: bad"
    assert error_said(report) == ""
