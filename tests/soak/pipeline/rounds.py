"""Rounds on ranks that live long, and what has to hold of all ranks together."""

from __future__ import annotations

import itertools
import pickle
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tests.ranks import _Pool
from tests.soak.campaign import Campaign, Settings, must
from tests.soak.pipeline.made import LONG, make
from tests.soak.pipeline.plan import BAD_SAMPLE, Plan, Visit, draw
from tests.soak.pipeline.play import Told, play

WARM = 25  # rounds until nothing may grow any more
GROWTH = {"rss": 64 << 20, "threads": 2, "files": 8}
SLACK = 8.0  # [s] for a machine that does other things, too


class Pipeline(Campaign):
    """Rounds with the same ranks, but for those in which one is killed.

    Each draws data sets, a grid, modes, budgets and a fault. Every box is compared with what the
    seed says; every fault has to end as docs/formats.md says.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.pool = _Pool()
        self.faults: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.rounds = self.batches = 0
        self.base: list[dict[str, int]] = []
        self.most: dict[str, int] = {}

    def play(self, number: int) -> str:
        return self.play_plan(draw(self.settings.seed, number, self.settings.ranks))

    def play_plan(self, plan: Plan) -> str:
        """Play a round; a line that says how it went.

        Raises:
            Violation: something that must hold does not.
        """
        begin = time.monotonic()
        told, reports = self._told(plan)
        ends = check(plan, told, reports)
        self.rounds += 1
        self.faults[plan.fault or "none"] += 1
        self.ends.update(f"{plan.fault or 'no fault'}: {end}" for end in ends)
        self.batches += sum(len(one.shown) for one in told if one)
        memory = "" if plan.fault == "killed" else self._grown(told)
        took = f"{time.monotonic() - begin:.1f} s"
        return f"{plan}: {', '.join(ends)}; {took}{memory}"

    def _told(self, plan: Plan) -> tuple[list[Told | None], list[str]]:
        """What each rank tells, None of one that died."""
        pool = _Pool() if plan.fault == "killed" else self.pool
        with tempfile.TemporaryDirectory(prefix="soak-") as name:
            for index, part in enumerate(plan.parts):
                if part.kind != "own":
                    nan = plan.bad if plan.fault == "nan" and index == 0 else -1
                    make(part, Path(name, str(index)), nan)
            try:
                outcomes = pool.run(plan.ranks, pickle.dumps((play, (plan, Path(name)))), 90)
            finally:
                if pool is not self.pool:
                    pool.close()
        reports = [f"{o.kind} {o.report}".strip() for o in outcomes]
        told = [pickle.loads(o.value) if o.kind == "returned" else None for o in outcomes]
        return told, reports

    def _grown(self, told: list[Told | None]) -> str:
        """Memory, threads and open files of the ranks, which must not grow."""
        now = [{kind: getattr(one, kind) for kind in GROWTH} for one in told if one]
        if self.rounds <= WARM:
            olds = self.base or now
            self.base = [{k: max(a[k], b[k]) for k in a} for a, b in zip(olds, now, strict=True)]
        for rank, (base, one) in enumerate(zip(self.base, now, strict=True)):
            for kind, bound in GROWTH.items():
                self.most[kind] = max(self.most.get(kind, 0), one[kind])
                must(
                    one[kind] <= base[kind] + bound,
                    f"rank {rank}: {kind} grew from {base[kind]} to {one[kind]}",
                )
        return f"; {now[0]['rss'] >> 20} MiB, {now[0]['threads']} threads, {now[0]['files']} files"

    def summary(self) -> dict[str, Any]:
        return {
            "mini-batches compared, of all ranks": self.batches,
            "rounds by fault": dict(sorted(self.faults.items())),
            "how ranks ended": dict(sorted(self.ends.items())),
            "a rank's after warming up": self.base[0] if self.base else None,
            "the most of a rank": self.most,
        }

    def close(self) -> None:
        self.pool.close()


def check(plan: Plan, told: list[Told | None], reports: list[str]) -> list[str]:
    """What has to hold of all ranks; how they ended, each kind once.

    Raises:
        Violation: something that must hold does not.
    """
    for rank, (one, report) in enumerate(zip(told, reports, strict=True)):
        killed = plan.fault == "killed" and rank in plan.victims
        must(one is not None or killed, f"rank {rank} {report}\n{plan}\n" + "\n".join(reports))
    alive = [one for one in told if one is not None]
    errors = [one.error for one in alive]
    if plan.fault in ("", "slow") or plan.harmless:
        must(not any(errors), f"{errors}\n{plan}")
        must(sum(t.sent for t in alive) == sum(t.received for t in alive), f"bytes sent\n{plan}")
    _check_shown(plan, alive)
    _check_errors(plan, told)
    return sorted({error[0] if error else "complete" for error in errors})


def _check_shown(plan: Plan, told: list[Told]) -> None:
    """The same samples in the same order on all ranks; each once; the bad one nowhere."""
    if not told:
        return
    longest = max(told, key=lambda one: len(one.shown)).shown
    for one in told:
        must(one.shown == longest[: len(one.shown)], f"order differs between ranks\n{plan}")
        must(one.error is not None or one.shown == longest, f"a rank saw less\n{plan}")
    if any(one.error for one in told):
        return
    for number, visit in enumerate(plan.visits):
        part = plan.parts[visit.part]
        shown = [s for _, n, step, s in longest if n == number and step < visit.stop]
        seen = Counter(itertools.chain(*shown))  # where one is skipped, more may have been shown
        expected = Counter(_expected(plan, visit))
        skips = part.how["on_error"] == "skip" and not plan.harmless
        bad = plan.fault in BAD_SAMPLE and visit.part == 0 and skips
        if bad:  # kept before its file was damaged, or not in reach of the rank that fails
            must(seen[plan.bad] <= expected[plan.bad], f"the bad sample is shown twice\n{plan}")
            if plan.fault == "nan":
                must(seen[plan.bad] == 0, f"a sample with a NaN was shown\n{plan}")
            del seen[plan.bad], expected[plan.bad]
        must(seen == expected, f"visit {number}: {seen} and not {expected}\n{plan}")


def _expected(plan: Plan, visit: Visit) -> list[int]:
    """The samples of a visit, from what the seed draws for the epoch."""
    part = plan.parts[visit.part]
    order = list(range(part.count))
    if part.how["shuffle"]:
        from hyperslab.data.sampler import ORDER, random_bits

        keys = random_bits(part.count, ORDER, part.how["seed"], visit.epoch)
        order = [int(i) for i in np.argsort(keys, kind="stable")]
    size = part.how["batch_size"]
    return order[visit.start * size : visit.stop * size]


def _check_errors(plan: Plan, told: list[Told | None]) -> None:
    name = plan.parts[0].names[plan.bad]
    skip = plan.parts[0].how["on_error"] == "skip"
    alive = [(rank, one) for rank, one in enumerate(told) if one is not None]
    for rank, one in alive:
        if one.error is None:
            continue
        kind, words = one.error
        if kind == "DataError":
            stated = plan.fault in BAD_SAMPLE and not skip
            of_all = "no sample" in words and skip and plan.fault in BAD_SAMPLE
            must((stated and name in words) or of_all, f"rank {rank}: {words}\n{plan}")
        elif kind == "CommError":
            others = plan.fault in ("late", "raises", "killed")
            must(others or (plan.fault in BAD_SAMPLE and not skip), f"{words}\n{plan}")
            must("rank" in words, words)
        else:
            must(plan.fault == "raises" and rank in plan.victims, f"{kind}\n{plan}")
    _check_times(plan, alive)
    if plan.synced and plan.fault == "killed":
        complete = [one.error for _, one in alive]
        must(all(complete) or not any(complete), f"{complete}\n{plan}")
        reached = all(one is not None for one in told)
        must(reached or all(complete), f"a rank did not notice\n{plan}")


def _check_times(plan: Plan, alive: list[tuple[int, Told]]) -> None:
    """Everybody learns of it at once, or, of a rank that is late, within the time limit."""
    faults = [one.fault for _, one in alive if one.fault]
    faults += [one.when for _, one in alive if one.error and one.error[0] == "DataError"]
    for rank, one in alive:
        limit = SLACK
        if plan.fault == "late":
            limit += plan.time_limit * (LONG if rank in plan.victims else 1)
        if faults and one.error:
            late = one.when - min(faults)
            must(late < limit, f"rank {rank} learned after {late:.0f} s\n{plan}")
    lost = [(rank, one.error[1]) for rank, one in alive if one.error and rank not in plan.victims]
    stops = all(part.how["on_error"] == "stop" for part in plan.parts)
    if plan.fault == "late" and lost and stops:  # who skips only knows that somebody is late
        named = f"contact with rank {plan.victims[0]} "
        must(any(named in words for _, words in lost), f"{lost}: names no {named}\n{plan}")
