"""What every optimizer of torch keeps comes back, bit by bit (tier: no process)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hyperslab.checkpoint.save_load import load, save
from hyperslab.errors import CheckpointError

OTHERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.001, "momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True, "lr": torch.tensor(0.01)},
    "LBFGS": {"history_size": 3, "max_iter": 4, "line_search_fn": "strong_wolfe"},
    "RMSprop": {"momentum": 0.9, "centered": True},
}
NAMES = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
)


class Odd(torch.optim.Optimizer):
    """Keeps what no optimizer of torch does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99), "note": None})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            kept = self.state[p]
            kept["complex"] = torch.randn(2, dtype=torch.complex64)
            kept["double"] = {"deep": [torch.randn(3, dtype=torch.complex128), (1, 2.5, None)]}
            kept["master"] = p.double() + 1e-12
            kept["half"] = p.bfloat16() + 1
            kept["count"] = torch.tensor(7)
            kept["empty"] = torch.zeros(0, 3)
            kept["mask"] = p > 0
            kept["text"] = "x"
            kept["conj"] = torch.randn(2, 2, dtype=torch.complex64).mH
            p.sub_(0.1)
        self.state["of all"] = {"best": float("inf")}


def network(seed: int, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv3d(2, 3, 3), nn.Flatten(), nn.Linear(3, 2)).to(dtype)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [*model.parameters()]
    if name == "Muon":
        parameters = [p for p in parameters if p.ndim == 2]
    if name == "Odd":
        return Odd(parameters)
    return vars(torch.optim)[name](parameters, **OTHERS.get(name, {}))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kind = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.rand(4, 2, 3, 3, 3, generator=generator).to(kind)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().sum()
            loss.backward()
            for p in model.parameters():
                if isinstance(optimizer, torch.optim.SparseAdam) and p.grad is not None:
                    p.grad = p.grad.to_sparse()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*NAMES, "Odd"])
def test_comes_back_and_trains_on_alike(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and name in ("LBFGS", "SparseAdam"):
        pytest.skip("torch's own has no bfloat16")
    model = network(0, dtype=dtype)
    optimizer = optimizer_of(name, model)
    train(model, optimizer, 3, seed=1)
    save(tmp_path / "a", model, optimizer)
    expected = copy.deepcopy(optimizer.state_dict())
    other = network(5, dtype=dtype)
    restored = optimizer_of(name, other)
    load(tmp_path / "a", other, restored)
    assert equal(restored.state_dict(), expected)
    if name != "Odd":  # which draws random numbers
        train(model, optimizer, 2, seed=2)
        train(other, restored, 2, seed=2)
    assert equal(restored.state_dict(), optimizer.state_dict())
    assert equal(dict(other.state_dict()), dict(model.state_dict()))


def test_weights_are_known_by_their_names(tmp_path: Path) -> None:
    model = network(0)
    optimizer = torch.optim.Adam([{"params": [*model.parameters()]}])
    train(model, optimizer, 2, seed=1)
    save(tmp_path / "a", model, optimizer)
    other = network(1)
    restored = torch.optim.Adam([{"params": [*other.parameters()][::-1]}])
    load(tmp_path / "a", other, restored)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert equal(dict(optimizer.state[ours]), dict(restored.state[theirs]))


def test_memory_formats_of_moments_come_back(tmp_path: Path) -> None:
    model = network(0).to(memory_format=torch.channels_last_3d)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1, seed=1)
    save(tmp_path / "a", model, optimizer)
    other = network(1).to(memory_format=torch.channels_last_3d)
    restored = torch.optim.Adam(other.parameters())
    load(tmp_path / "a", other, restored)
    weight = other[0].weight
    assert weight.stride() == model[0].weight.stride()
    assert restored.state[weight]["exp_avg"].stride() == weight.stride()
    assert equal(dict(restored.state[weight]), dict(optimizer.state[model[0].weight]))


@pytest.mark.parametrize("difference", ["fewer weights", "other groups", "no optimizer"])
def test_another_optimizer_is_refused_and_nothing_is_changed(
    tmp_path: Path, difference: str
) -> None:
    model = network(0)
    save(tmp_path / "a", model, None if difference == "no optimizer" else _sgd(model))
    other = network(1)
    before = copy.deepcopy(other.state_dict())
    weights = [*other.parameters()]
    groups = {
        "fewer weights": [{"params": weights[:-1]}],
        "other groups": [{"params": weights[:1]}, {"params": weights[1:]}],
        "no optimizer": [{"params": weights}],
    }
    with pytest.raises(CheckpointError, match=r"does not fit this model: .*optimizer"):
        load(tmp_path / "a", other, torch.optim.SGD(groups[difference]))
    assert equal(dict(other.state_dict()), dict(before))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(("kept", "wanted"), [("Adam", "SGD"), ("SGD", "Adam"), ("Adamax", "Adam")])
def test_another_optimizer_is_refused(tmp_path: Path, kept: str, wanted: str) -> None:
    model = network(1)
    save(tmp_path / "a", model, getattr(torch.optim, kept)(model.parameters()))
    other = network(2)
    before = copy.deepcopy(other.state_dict())
    optimizer = getattr(torch.optim, wanted)(other.parameters())
    with pytest.raises(CheckpointError, match=f"state of the optimizer {kept}, not of {wanted}"):
        load(tmp_path / "a", other, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_an_optimizer_of_the_same_settings_takes_it(tmp_path: Path) -> None:
    model = network(1)
    save(tmp_path / "a", model, torch.optim.Adam(model.parameters(), lr=0.5))
    optimizer = torch.optim.AdamW(model.parameters())
    load(tmp_path / "a", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("before", [None, True])
def test_how_a_step_is_computed_is_not_of_the_checkpoint(
    tmp_path: Path, before: bool | None
) -> None:
    """One of a GPU, where one kernel updates all weights, goes on without, and the other way."""

    def trained(fused: bool | None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()

    model, optimizer = trained(before)
    step(model, optimizer)
    save(tmp_path / "one", model, optimizer)
    after = None if before else True
    other, loaded = trained(after)
    load(tmp_path / "one", other, loaded)
    assert loaded.param_groups[0]["fused"] is after
    for one in ((model, optimizer), (other, loaded)):
        step(*one)
    torch.testing.assert_close(other.weight, model.weight)
