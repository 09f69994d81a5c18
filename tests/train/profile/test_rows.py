"""From events to rows and layers (tier: no process)."""

from __future__ import annotations

import pytest

from hyperslab.train.profiler import (
    Piece,
    ProfiledRange,
    by_range,
    exclusive,
    layer_times,
    step_times,
)
from tests.train.profile.events import a_step


def test_every_moment_counts_once() -> None:
    step, *events = a_step()
    labels: list[str] = []
    times = step_times(7, step, events, labels)
    assert times.rows == pytest.approx(
        {
            "convolutions": 4 + 5,
            "operators": 1,
            "halos": 1 + 1.5,
            "statistics": 0,
            "gradients": 2,
            "data": 2,
            "vote": 0,
            "framework": 1 + 0.5 + 1,
        }
    )
    assert times.seconds == 20
    assert times.covered == pytest.approx(19 / 20)  # the last second belongs to nothing


def test_spans_are_after_the_begin_of_the_step_and_have_words() -> None:
    step, *events = a_step()
    labels: list[str] = []
    spans = step_times(7, step, events, labels).spans
    assert [(a, b, labels[i]) for a, b, i in spans["convolutions"]] == [
        (4, 8, "conv1: convolution"),
        (10, 15, "convolution_backward"),
    ]
    assert [(a, b, labels[i]) for a, b, i in spans["halos under way"]] == [(3, 9.5, "the halo")]


def test_a_wait_covers_the_operators_within_it() -> None:
    pieces = [Piece("operators", 1, 2, "copy"), Piece("halos", 0, 3, "wait")]
    assert exclusive(pieces, 0.5, 5) == [Piece("halos", 0.5, 3, "wait")]


def test_layers_get_their_backward_by_autograds_number() -> None:
    _, *events = a_step()
    found = {(t.layer, t.stage): t for t in layer_times(events, 2)}
    assert found["conv1", "forward"].compute == 2
    assert found["conv1", "forward"].communication == pytest.approx(1.25)
    assert found["conv1", "backward"].compute == 2.5
    assert found["", "optimizer"].compute == 0.5
    assert found["", "forward"].communication == 1  # the gradients


def test_events_by_the_ranges_that_they_overlap() -> None:
    steps = [ProfiledRange("step", begin, begin + 10) for begin in (10, 30)]
    times = [(5, 10), (5, 11), (12, 13), (19, 31), (20, 30), (39, 50), (40, 41)]
    events = [ProfiledRange("event", *time) for time in times]
    expected = [[e for e in events if e.begin < step.end and e.end > step.begin] for step in steps]
    assert by_range(steps, events) == expected
    assert [len(found) for found in expected] == [3, 2]
