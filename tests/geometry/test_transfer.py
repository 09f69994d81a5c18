"""Exchange plans of random owners and wishes, against sets of indices (tier: no process)."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from hyperslab.geometry import Box, TransferPlan, plan_transfers
from tests.geometry.test_boxes import Index, boxes, indices

RANKS = 4
fixed = settings(derandomize=True, deadline=None, max_examples=100, database=None)
wishes = st.dictionaries(st.integers(0, RANKS - 1), boxes(2), max_size=RANKS)


@st.composite
def owners(draw: st.DrawFn) -> dict[int, Box]:
    """Some ranks with disjoint boxes: rows of a random partition, in any order."""
    bounds = sorted(draw(st.lists(st.integers(-3, 8), min_size=2, max_size=RANKS + 1)))
    ranks = draw(st.permutations(range(len(bounds) - 1)))
    return {
        rank: Box((bounds[i], -2), (bounds[i + 1], 7))
        for i, rank in enumerate(ranks)
        if draw(st.booleans())
    }


def received(plan: TransferPlan) -> set[Index]:
    return set().union(*(indices(transfer.box) for transfer in plan.receives))


@fixed
@given(owners(), wishes)
def test_everybody_gets_what_somebody_owns(owned: dict[int, Box], wanted: dict[int, Box]) -> None:
    plans = [plan_transfers(rank, owned, wanted) for rank in range(RANKS)]
    known = set().union(*map(indices, owned.values()))
    for rank, plan in enumerate(plans):
        kept = set() if plan.kept is None else indices(plan.kept)
        wish = indices(wanted[rank]) if rank in wanted else set()
        assert kept | received(plan) == wish & known
        assert not kept & received(plan)
        assert plan.local == (not plan.sends and not plan.receives)


@fixed
@given(owners(), wishes)
def test_every_message_has_two_ends(owned: dict[int, Box], wanted: dict[int, Box]) -> None:
    plans = [plan_transfers(rank, owned, wanted) for rank in range(RANKS)]
    sent = [(rank, t.rank, t.box) for rank, plan in enumerate(plans) for t in plan.sends]
    due = [(t.rank, rank, t.box) for rank, plan in enumerate(plans) for t in plan.receives]
    assert sorted(sent, key=repr) == sorted(due, key=repr)
    assert all(sender != receiver for sender, receiver, _ in sent)


def test_a_box_with_neighbours_on_all_sides() -> None:
    """27 boxes of a cube, each of which wishes one voxel more on every side."""
    spans = [(0, 2), (2, 3), (3, 6)]
    places = [tuple(zip(*place, strict=True)) for place in itertools.product(spans, repeat=3)]
    owned = {rank: Box(low, high) for rank, (low, high) in enumerate(places)}
    wanted = {
        rank: Box(tuple(x - 1 for x in low), tuple(x + 1 for x in high))
        for rank, (low, high) in enumerate(places)
    }
    known = set().union(*map(indices, owned.values()))
    plans = [plan_transfers(rank, owned, wanted) for rank in owned]
    for rank, plan in enumerate(plans):
        assert received(plan) == indices(wanted[rank]) & known - indices(owned[rank])
        assert plan.kept == owned[rank]
    middle = {*owned} - {13}
    assert {t.rank for t in plans[13].receives} == {t.rank for t in plans[13].sends} == middle
