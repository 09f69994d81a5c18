"""Ordinary tensors that enter a parallelised module in training (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hyperslab as hs
from hyperslab.comm.collectives import AllGatheredInts
from tests.ranks import run_ranks


class Conditioned(nn.Module):
    """As networks of diffusion have it: a time beside the volume."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 2, 3, padding=1)
        self.embed = nn.Linear(1, 2)

    def forward(self, x: Any, t: Any = None) -> Any:
        y = self.conv(x)
        return y if t is None else y + self.embed(t)[:, :, None, None, None]


def volume(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 4**3, dtype=dtype).view(2, 1, 4, 4, 4)


def alone(case: str) -> None:
    grid = hs.Grid(depth=2)
    trust = case == "meant"
    model = hs.parallelize(
        Conditioned() if case != "embedding" else nn.Embedding(3, 4),
        grid,
        ordinary_inputs="trust" if trust else "check",
        find_unused_parameters=True,
    )
    x: Any = volume() + grid.rank
    if case == "frozen":
        model.requires_grad_(False)
    elif case == "evaluation":
        model.eval()
    elif case == "embedding":
        x = torch.tensor([0, 2])
    if case == "no_grad":
        with torch.no_grad():
            model(x)
        return
    loss = model({"a": x}["a"]).sum()
    if case in ("training", "evaluation", "meant"):
        loss.backward()


@pytest.mark.parametrize("case", ["training", "evaluation"])
def test_alone_it_is_refused_in_training(case: str) -> None:
    with pytest.raises(hs.LayoutError) as caught:
        run_ranks(2, alone, case)
    message = str(caught.value)
    assert "(2, 1, 4, 4, 4) torch.float32 enters the parallelised Conditioned" in message
    assert "on 2 ranks" in message
    assert "hyperslab.shard(x, grid)" in message
    assert "hyperslab.scatter(x, grid)" in message
    assert 'ordinary_inputs="trust"' in message


@pytest.mark.parametrize("case", ["no_grad", "meant", "frozen", "embedding"])
def test_alone_it_may_enter(case: str) -> None:
    run_ranks(2, alone, case)


def evaluated() -> None:
    """Each rank may predict volumes of its own, in between."""
    grid = hs.Grid(depth=2)
    model = hs.parallelize(Conditioned(), grid, find_unused_parameters=True)
    model.eval()
    model(volume() + grid.rank)
    model.train()
    model(hs.shard(volume(), grid)).sum().backward()


def test_an_evaluation_between_two_steps() -> None:
    run_ranks(2, evaluated)


def meant_average() -> float:
    grid = hs.Grid(data=2)
    model = hs.parallelize(nn.Linear(1, 1), grid, ordinary_inputs="trust")
    model(torch.tensor([[1.0 + 4 * grid.rank]])).sum().backward()
    return model.weight.grad.item()


def test_what_is_meant_is_averaged_as_by_data_parallelism() -> None:
    assert run_ranks(2, meant_average) == [3.0, 3.0]


def beside(case: str, trust: bool = False) -> str:
    grid = hs.Grid(depth=2)
    model = hs.parallelize(Conditioned(), grid, ordinary_inputs="trust" if trust else "check")
    t = torch.tensor([[0.25], [0.5]])
    if case == "values" and grid.rank == 1:
        t[1] += 1e-7
    elif case == "type" and grid.rank == 1:
        t = t.double()
    try:
        model(hs.shard(volume(), grid), t=t)
    except hs.LayoutError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", ["values", "type"])
def test_beside_a_cut_one_it_has_to_be_equal(case: str) -> None:
    for message in run_ranks(2, beside, case):
        assert "rank 1 would pass other ordinary tensors to Conditioned than rank 0" in message
        assert "on this rank they are (2, 1) torch.float" in message
        assert 'ordinary_inputs="trust"' in message


def test_beside_a_cut_one_it_may_be_equal_or_trusted() -> None:
    assert run_ranks(2, beside, "equal") == ["", ""]
    assert run_ranks(2, beside, "values", True) == ["", ""]


def gradients(axes: dict[str, int]) -> list[torch.Tensor]:
    grid = hs.Grid(**axes)
    torch.manual_seed(4)
    model = hs.parallelize(Conditioned().double(), grid)
    t = torch.rand(2, 1, dtype=torch.float64)
    y = model(hs.shard(volume(torch.float64), grid), t)
    (y * y).mean().backward()
    return [p.grad for p in model.parameters()]


def test_gradients_beside_an_ordinary_tensor_are_the_serial_ones() -> None:
    ((expected,), found) = (run_ranks(1, gradients, {}), run_ranks(2, gradients, {"depth": 2}))
    for gradient, serial in zip(found[1], expected, strict=True):
        torch.testing.assert_close(gradient, serial)


def messages_of_a_step() -> int:
    grid = hs.Grid(depth=2)
    model = hs.parallelize(Conditioned(), grid, find_unused_parameters=True)
    x = hs.shard(volume(), grid)
    model(x).sum().backward()  # at which parameters are compared, and at the second
    model(x).sum().backward()
    made = []
    before = AllGatheredInts.__init__
    try:
        AllGatheredInts.__init__ = lambda self, *a: made.append(before(self, *a))  # type: ignore[method-assign,assignment]
        model(x).sum().backward()
    finally:
        AllGatheredInts.__init__ = before  # type: ignore[method-assign]
    return len(made)


def test_cut_tensors_alone_cost_no_message() -> None:
    assert run_ranks(2, messages_of_a_step) == [0, 0]


def test_unknown_words() -> None:
    for asked in ({"ordinary_inputs": "any"}, {"random_states": "equal"}):
        with pytest.raises(hs.LayoutError, match="; use one of "):
            hs.parallelize(nn.Linear(1, 1), hs.Grid(), **asked)  # type: ignore[arg-type]


def gradients_of_inputs(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Of a time and of what another is made of; no cut tensor is beside either in the network."""
    time = torch.tensor([[0.5], [2.0]], dtype=torch.float64, requires_grad=True)
    other = torch.ones_like(time, requires_grad=True)
    for t in (time, other * 2):
        (model(x, t) ** 2).mean().backward()
    return [time.grad, other.grad]


def averaged() -> None:
    torch.manual_seed(0)
    model = Conditioned().double()
    want = gradients_of_inputs(model, volume(torch.float64))
    grid = hs.Grid(depth=2)
    got = gradients_of_inputs(hs.parallelize(model, grid), hs.shard(volume(torch.float64), grid))
    for a, b in zip(got, want, strict=True):
        assert a is not None
        assert b is not None
        assert torch.allclose(a, b, rtol=1e-12)


def test_their_gradients_are_serial() -> None:
    run_ranks(2, averaged)


class Coloured(nn.Module):
    """Multiplies channels by a tensor that does not enter as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 2, 3, padding=1)
        self.colour = torch.ones(2)

    def forward(self, x: Any) -> Any:
        for _ in range(2):
            x = self.conv(x) * self.colour.view(1, 2, 1, 1, 1)
            x = x.sum(1, keepdim=True)
        return x


def asked_for(grid: hs.Grid | None) -> list[torch.Tensor | None]:
    """Gradients on request, first and second, and those of what makes a network's constant."""
    torch.manual_seed(0)
    x: Any = volume(torch.float64).exp()
    model, encoder = Coloured().double(), nn.Linear(3, 2).double()
    colour = torch.rand(1, 2, 1, 1, 1, dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.rand(1, 2, 1, 1, 1, dtype=torch.float64))
    if grid is not None:
        x = hs.shard(x, grid)
        hs.parallelize(model, grid)
    (first,) = torch.autograd.grad((x * colour).pow(4).mean(), colour, create_graph=True)
    (first * first).sum().backward()
    double = colour * 2
    both = torch.autograd.grad((x * double).pow(4).mean() + double.sum(), (colour, double))
    of_parameter = torch.autograd.grad((x * weight).pow(4).mean(), weight)
    whole = x if grid is None else hs.gather(x, ("depth",))
    other = nn.Parameter(torch.rand(1, 2, 1, 1, 1, dtype=torch.float64))
    of_parameter += torch.autograd.grad((whole * other + x).pow(4).mean(), other)
    model.colour = encoder(torch.arange(3.0).double())
    model(x).square().mean().backward()
    gradients = [p.grad for p in (*model.parameters(), *encoder.parameters())]
    return [first.detach(), colour.grad, *both, *of_parameter, *gradients]


def asked_of_ranks() -> None:
    for found, wanted in zip(asked_for(hs.Grid(depth=2)), asked_for(None), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_gradients_on_request_and_of_a_constant_are_serial() -> None:
    run_ranks(2, asked_of_ranks)


class Residual(nn.Module):
    """Scales channels by what a residual network makes of a parameter and of what is around."""

    def __init__(self, around: torch.Tensor | None) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 2, 3, padding=1)
        self.start = nn.Parameter(torch.ones(2))
        self.layer = nn.Linear(2, 2)
        self.around = around

    def forward(self, x: Any) -> Any:
        scale = self.start
        for _ in range(64):  # as many ways through it as 2 ** 64
            scale = scale + self.layer(scale).tanh() / 64
        if self.around is not None:
            scale = scale * self.around
        return self.conv(x) * scale.view(1, 2, 1, 1, 1)


def of_a_residual_network(grid: hs.Grid | None) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    around = torch.rand(2, dtype=torch.float64, requires_grad=True)
    x: Any = volume(torch.float64)
    gradients = []
    for given in (None, around):
        model = Residual(given).double()
        if grid is not None:
            hs.parallelize(model, grid)
        model(x if grid is None else hs.shard(x, grid)).square().mean().backward()
        gradients += [p.grad for p in model.parameters()]
    return [*gradients, around.grad]


def a_residual_network() -> None:
    found = of_a_residual_network(hs.Grid(depth=2))
    for gradient, wanted in zip(found, of_a_residual_network(None), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-15)


def test_what_a_residual_network_makes_is_followed_back_once() -> None:
    run_ranks(2, a_residual_network, timeout=60)
