"""Networks of all kinds come back as they were (tier: no process)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyperslab.checkpoint.save_load import load, save


class WithExtraState(nn.Module):
    """Keeps tensors beside its weights, one under a name that a weight has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("_extra_state/scale", nn.Parameter(torch.zeros(3)))
        self.kept: dict[str, Any] = {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.kept

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.kept = state


def test_extra_state_with_tensors(tmp_path: Path) -> None:
    module = WithExtraState()
    module.kept = {"scale": torch.ones(2), "history": [(1, torch.arange(3))]}
    save(tmp_path / "a", nn.ModuleDict({"part": module, "plain": nn.Linear(2, 2)}))
    other = WithExtraState()
    load(tmp_path / "a", nn.ModuleDict({"part": other, "plain": nn.Linear(2, 2)}))
    assert torch.equal(other.kept["scale"], torch.ones(2))
    assert torch.equal(other.kept["history"][0][1], torch.arange(3))
    assert torch.equal(next(other.parameters()), torch.zeros(3))


@pytest.mark.parametrize("name", ["__metadata__", "\udc80", "a/b", "\n", "$tensor", "#0"])
def test_names_that_files_do_not_have(tmp_path: Path, name: str) -> None:
    first, second = (
        nn.ParameterDict({name: torch.ones(2)}),
        nn.ParameterDict({name: torch.zeros(2)}),
    )
    optimizer = torch.optim.SGD(first.parameters(), momentum=0.9)
    first[name].grad = torch.ones(2)
    optimizer.step()
    save(tmp_path / "a", first, optimizer)
    again = torch.optim.SGD(second.parameters(), momentum=0.9)
    load(tmp_path / "a", second, again)
    assert torch.equal(first[name], second[name])
    assert torch.equal(again.state[second[name]]["momentum_buffer"], torch.ones(2))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.module = nn.Linear(1, 1)  # is no wrapper's


WRAPPED = {
    "DDP": lambda net: nn.parallel.DistributedDataParallel(net),
    "compiled DDP": lambda net: torch.compile(
        nn.parallel.DistributedDataParallel(net), backend="eager"
    ),
    "DDP of compiled": lambda net: nn.parallel.DistributedDataParallel(
        torch.compile(net, backend="eager")
    ),
    "DataParallel": lambda net: nn.DataParallel(net),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("how", WRAPPED)
def test_wrapped_or_not(tmp_path: Path, how: str, within: bool) -> None:
    net, other = nn.Conv3d(1, 2, 3), nn.Conv3d(1, 2, 3)
    wrapped = WRAPPED[how](net)
    save(tmp_path / "a", Outer(wrapped) if within else wrapped)
    load(tmp_path / "a", Outer(other) if within else other)
    assert torch.equal(net.weight, other.weight)
