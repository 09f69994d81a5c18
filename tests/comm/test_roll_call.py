"""Who comes to the start, and do they want the same (tier: no process; ranks are threads)."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hyperslab.comm import rendezvous
from hyperslab.comm.launchers import RankVariables
from hyperslab.comm.rendezvous import (
    Deadline,
    answer_roll_call,
    compare_facts,
    in_time,
    meet,
    name_ranks,
)
from hyperslab.errors import CommError, HyperslabError, LayoutError, RecipeError
from tests.ports import unused_port


def place_of(rank: int, size: int, path: Path) -> RankVariables:
    return RankVariables(rank, size, rank, "", 0, str(path))


def outcomes(
    path: Path,
    facts: dict[int, dict[str, Any]],
    size: int,
    *,
    limit: float = 20,
    problems: dict[int, str] | None = None,
    devices: dict[int, str] | None = None,
) -> dict[int, str]:
    """What each of the ranks that come says; "" where it goes on."""

    def rank(number: int) -> str:
        place = place_of(number, size, path)
        deadline = Deadline(limit)
        problem = (problems or {}).get(number, "")
        device = (devices or {}).get(number, "")
        try:
            store = meet(place, deadline)
            answer_roll_call(store, place, facts[number], deadline, problem=problem, device=device)
        except HyperslabError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with ThreadPoolExecutor(len(facts)) as pool:
        return dict(zip(facts, pool.map(rank, facts), strict=True))


def test_ranks_that_agree_go_on_and_may_start_again(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with path.open("w"):
        for _ in range(2):
            alike = {rank: {"recipe": {"epochs": 3, "betas": [0.9, 0.99]}} for rank in range(3)}
            assert outcomes(path, alike, 3) == {0: "", 1: "", 2: ""}


def test_ranks_with_one_device_are_named_and_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "store"
    alike: dict[int, dict[str, Any]] = {rank: {"seed": 1} for rank in range(3)}
    with path.open("w"):
        assert outcomes(path, alike, 3, devices={0: "a", 1: "b"}) == {0: "", 1: "", 2: ""}
        said = outcomes(path, alike, 3, devices={0: "a", 1: "b", 2: "a"})
    assert len({*said.values()}) == 1
    assert said[1].startswith("LayoutError: ranks 0 and 2 have the same CUDA device, a\n")


def test_a_difference_is_named_on_every_rank(tmp_path: Path) -> None:
    facts = {r: {"optimizer": {"learning_rate": 0.1 if r else 0.2}, "seed": 0} for r in range(4)}
    facts[3]["seed"] = 1
    found = outcomes(tmp_path / "store", facts, 4)
    words = (
        "RecipeError: the ranks differ in optimizer.learning_rate: 0.2 on rank 0, 0.1 on ranks 1 "
        "to 3\n    and in seed\n    start all ranks with the same command, recipe and versions"
    )
    assert found == dict.fromkeys(range(4), words)


def test_a_key_that_only_some_have_and_hosts() -> None:
    words = compare_facts([{"a": {"b": None}}, {"a": {}}, {}], ["n1", "n2", "n2"])
    assert words.startswith("the ranks differ in a.b: null on rank 0 (n1), nothing on ranks 1 and")
    assert "2 (n2)\n    and in a\n" in words
    assert compare_facts([{"a": {"b": [1]}}] * 3, ["n1", "n2", "n3"]) == ""


@pytest.mark.parametrize("other", [True, 1.0])
def test_values_that_python_takes_for_equal_differ(other: object) -> None:
    words = compare_facts([{"a": 1}, {"a": other}], ["n1", "n1"])
    assert words.startswith(f"the ranks differ in a: 1 on rank 0, {json.dumps(other)} on rank 1")


def test_who_did_not_come_is_named(tmp_path: Path) -> None:
    found = outcomes(tmp_path / "store", {0: {}, 1: {}, 3: {}}, 5, limit=2)
    assert len({*found.values()}) == 1
    assert found[0].startswith(
        "CommError: ranks 2 and 4 did not come to the store of their launcher within 2 s: "
        "ranks 0, 1 and 3 of 5 did\n"
    )


def test_without_rank_0_nobody_goes_on(tmp_path: Path) -> None:
    found = outcomes(tmp_path / "store", {1: {}, 2: {}}, 3, limit=2)
    assert found[1].startswith("CommError: rank 0 did not come to the store of their launcher")


def test_a_rank_that_cannot_go_on_says_why(tmp_path: Path) -> None:
    found = outcomes(tmp_path / "store", {0: {}, 1: {}, 2: {}}, 3, problems={2: "no file"})
    assert found == dict.fromkeys(range(3), "HyperslabError: rank 2 says: no file")


def test_a_stranger_is_refused_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of another Slurm step that reaches this one's store."""
    path = tmp_path / "store"
    monkeypatch.setenv("HYPERSLAB_RUN", "Slurm job 7 step 1")
    meet(place_of(0, 2, path), Deadline(5)).set("here", "")  # or its last user would remove it
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcomes, path, {0: {}}, 2)
        store = dist.FileStore(str(path), 2)  # type: ignore[attr-defined]
        assert Deadline(10).poll(lambda: store.check(["run"]))
        monkeypatch.setenv("HYPERSLAB_RUN", "Slurm job 7 step 2")
        refused = outcomes(path, {1: {}}, 2)
        monkeypatch.setenv("HYPERSLAB_RUN", "Slurm job 7 step 1")
        assert outcomes(path, {1: {}}, 2) == {1: ""}
        assert first.result() == {0: ""}
    assert refused[1].startswith(
        "HyperslabError: rank 1 belongs to another run than those at the store of their launcher: "
        "its HYPERSLAB_RUN is Slurm job 7 step 2, theirs is Slurm job 7 step 1\n"
    )


def test_a_number_belongs_to_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcomes, path, {0: {}, 1: {}}, 3, limit=3)
        store = dist.FileStore(str(path), 3)  # type: ignore[attr-defined]
        assert Deadline(10).poll(lambda: store.check(["process 1 1"]))
        monkeypatch.setattr(rendezvous.os, "getpid", lambda: 4_000_000)
        found = outcomes(path, {1: {}}, 3)
        assert first.result()[0].startswith("CommError: rank 2 did not come")
    assert found[1].startswith("HyperslabError: RANK=1 is taken: process ")
    assert "before process 4000000 on" in found[1]


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(HyperslabError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_busy_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        place = RankVariables(0, 2, 0, "127.0.0.1", port, None)
        words = error_of(lambda: meet(place, Deadline(5)))
    where = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    assert words.startswith(f"HyperslabError: rank 0 cannot listen at {where}: Address already in")


def test_nobody_listens() -> None:
    place = RankVariables(1, 2, 0, "127.0.0.1", unused_port(), None)
    words = error_of(lambda: meet(place, Deadline(0.5)))
    assert words.startswith("CommError: rank 1 of 2 does not reach rank 0 at MASTER_ADDR=127.0.0.1")
    assert "within 0.5 s: Connection refused\n" in words


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_of_no_machine(rank: int) -> None:
    place = RankVariables(rank, 2, 0, "no-such-host.invalid", 29400, None)
    words = error_of(lambda: meet(place, Deadline(0.5)))
    assert words.startswith(
        "HyperslabError: MASTER_ADDR='no-such-host.invalid' is not the name of a"
    )


def test_who_holds_the_port_and_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        place = RankVariables(1, 2, 0, "127.0.0.1", held.getsockname()[1], None)
        late = CommError("nothing")
        words = error_of(lambda: in_time(1, lambda: meet(place, Deadline(0.5)), lambda: late))
    assert words == "CommError: nothing"


def test_one_rank_alone_needs_no_place() -> None:
    place = RankVariables(0, 1, 0, "localhost", 0, None)
    deadline = Deadline(5)
    store, numbers = answer_roll_call(meet(place, deadline), place, {"seed": 1}, deadline)
    store.set("a", "b")
    assert [*numbers] == [0]


def test_rank_0_listens_at_its_address_alone() -> None:
    port = unused_port()
    place = RankVariables(0, 1, 0, "127.0.0.1", port, None)
    store = meet(place, Deadline(5))
    store.set("a", "b")
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {local for _, local, _, state, *_ in table if state == "0A"}
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening


def test_ranks_in_words() -> None:
    assert name_ranks([1, 0]) == "ranks 0 and 1"
    assert name_ranks(range(1000)) == "ranks 0 to 999"


def test_kinds_of_errors() -> None:
    assert {kind: error.__name__ for kind, error in rendezvous.VERDICTS.items()} == {
        "lost": CommError.__name__,
        "problem": HyperslabError.__name__,
        "shared": LayoutError.__name__,
        "differ": RecipeError.__name__,
    }
