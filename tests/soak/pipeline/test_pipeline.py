"""A short soak with every fault (tier: four gloo ranks); `make soak` runs the long one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from tests.soak.campaign import Settings, Violation
from tests.soak.pipeline.plan import BAD_SAMPLE, FAULTS, Plan, draw
from tests.soak.pipeline.play import Told
from tests.soak.pipeline.rounds import Pipeline, check

SEED = 5


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    found = Pipeline(Settings(SEED, 4, tmp_path_factory.mktemp("soak")))
    yield found
    found.close()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_fault_ends_as_stated(soak: Pipeline, fault: str) -> None:
    for number, on_error in enumerate(["stop", "skip"]):
        plan = draw(SEED, number, 4, fault)
        if fault == "late":
            print(soak.play_plan(dataclasses.replace(plan, time_limit=2.0)))
            return
        first = dataclasses.replace(plan.parts[0], how=plan.parts[0].how | {"on_error": on_error})
        parts, every = (first, *plan.parts[1:]), (0, 1, 2, 3)
        plan = dataclasses.replace(plan, parts=parts)
        if fault in BAD_SAMPLE:
            line = soak.play_plan(dataclasses.replace(plan, victims=every))
            assert ("DataError" in line) == (on_error == "stop")
        else:
            print(soak.play_plan(plan))


def told(plan: Plan) -> list[Told | None]:
    """What four ranks tell of a round in which all goes well."""
    shown = []
    for number, visit in enumerate(plan.visits):
        part = plan.parts[visit.part]
        size, order = part.how["batch_size"], list(range(part.count))
        for step in range(visit.start, visit.stop):
            samples = tuple(order[step * size : (step + 1) * size])
            shown.append((visit.part, number, step, samples))
    return [Told(shown=list(shown)) for _ in range(4)]


def quiet() -> Plan:
    """A round without a fault, in order."""
    plan = draw(SEED, 0, 4, "")
    parts = tuple(dataclasses.replace(p, how=p.how | {"shuffle": False}) for p in plan.parts)
    return dataclasses.replace(plan, parts=parts)


def test_the_soak_notices() -> None:
    plan, fine = quiet(), ["returned"] * 4
    assert check(plan, told(plan), fine) == ["complete"]
    cases = {
        "order differs": lambda ranks: ranks[2].shown.reverse(),
        "saw less": lambda ranks: ranks[1].shown.pop(),
        "visit 0": lambda ranks: [one.shown.pop(0) for one in ranks],
        "bytes sent": lambda ranks: setattr(ranks[0], "sent", 1),
        "CommError": lambda ranks: setattr(ranks[3], "error", ("CommError", "rank 0")),
    }
    for words, change in cases.items():
        ranks = told(plan)
        change(ranks)
        with pytest.raises(Violation, match=words):
            check(plan, ranks, fine)
    with pytest.raises(Violation, match="rank 1 died"):
        check(plan, [None if r == 1 else one for r, one in enumerate(told(plan))], ["died"] * 4)
