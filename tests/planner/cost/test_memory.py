"""The memory of a rank by use (tier: no process)."""

from __future__ import annotations

from hyperslab.comm.shared_memory import shared_bytes
from hyperslab.planner.cost import RankMemory, rank_memory
from tests.planner.cost.made import exchange, operator, round_machine, trace

SIZES = {
    "saved": 1000,
    "parameters": 100,
    "gradients": 100,
    "optimizer_state": 200,
    "peak": 1700,
    "heap": 1700,
}
HOST = RankMemory(ahead=10, store=20, process=30)


def test_the_fullest_moment_is_divided_by_use() -> None:
    step = trace(exchange(50, peers=(1, 2)), exchange(70, "backward"), operator("main"), **SIZES)
    found = rank_memory(step, round_machine(), 2, HOST)
    assert found.halos == 100  # what the forward pass receives
    assert found.activations == 900
    assert found.workspace == 300
    assert found.communication == shared_bytes(2) // 2
    assert found.total == 1700 + 10 + 20 + 30 + shared_bytes(2) // 2
    assert sum(found.as_dict().values()) == found.total


def test_a_gpu_does_not_hold_what_the_host_holds() -> None:
    machine = round_machine().model_copy(update={"device": "cuda"})
    found = rank_memory(trace(operator("main"), **SIZES), machine, 2, HOST)
    assert found.total == 1700
    assert found.process == found.store == found.communication == 0


def test_one_rank_shares_nothing() -> None:
    assert rank_memory(trace(**SIZES), round_machine(), 1, HOST).communication == 0


def test_a_cpu_has_the_holes_of_its_heap() -> None:
    sizes = {**SIZES, "heap": 2000}
    assert rank_memory(trace(**sizes), round_machine(), 1, HOST).workspace == 600
