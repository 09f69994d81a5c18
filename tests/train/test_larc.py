"""LARC and the schedules against numpy, step by step (tiers: no process; a few gloo ranks)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import hyperslab as hs
from hyperslab.checkpoint.run_state import DataCard, Position, RunState
from hyperslab.formats.targets import Parameters
from hyperslab.models.larc import scale_by_norms
from hyperslab.recipe.schema import Recipe
from hyperslab.train.objective import Objective
from hyperslab.train.optimizer import build_optimizer, build_schedule
from hyperslab.train.step import LossScaler
from hyperslab.train.trainer import Progress, Trainer
from tests.ranks import run_ranks
from tests.selection import by_rotation, in_gate

Floats = NDArray[np.float64]

STEPS = 20
PER_EPOCH = 6
SHAPE = (4, 3, 5, 4, 6)  # (B, C, D, H, W) of a mini-batch, unevenly cut
OUTPUTS = 2
GRIDS = [{}, {"depth": 2}, {"data": 2}, {"data": 2, "height": 2}, {"depth": 2, "width": 2}]
SCHEDULES: list[dict[str, Any]] = [
    {"name": "polynomial", "epochs": 2.5, "factor": 0.05},
    {"name": "polynomial", "epochs": 3, "factor": 0.2, "power": 2.5, "warmup": 1},
    {"name": "linear", "epochs": 2.5, "factor": 0.1},
    {"name": "steps", "warmup": 0.5, "at": {1: 0.5, 2: 0.125}},
]


def network() -> nn.Module:
    """y = W2 mean(W1 x + b1) + b2, its first bias zero: LARC's ``otherwise``."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv3d(SHAPE[1], 4, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, OUTPUTS)
    ).double()
    nn.init.zeros_(model.get_parameter("0.bias"))
    return model


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(SHAPE, generator=random, dtype=torch.float64),
            torch.randn(SHAPE[0], OUTPUTS, generator=random, dtype=torch.float64),
        )
        for _ in range(2 * STEPS)
    ]


def recipe(optimizer: dict[str, Any], grid: dict[str, int]) -> Recipe:
    data = {"synthetic": {"width": 8}, "batch_size": SHAPE[0]}
    return Recipe.model_validate(
        {"data": data, "optimizer": optimizer, "grid": grid, "output": "nowhere", "device": "cpu"}
    )


class Nothing:
    """Data of which the trainer asks only how many there are."""

    wait_seconds = 0.0
    at = 0

    def __len__(self) -> int:
        return 10**6


def trained(optimizer: dict[str, Any], grid: dict[str, int]) -> list[list[Floats]]:
    """The weights after each step of the trainer, on this rank."""
    config = recipe(optimizer, grid)
    ranks = hs.Grid(**config.grid.model_dump())
    model = hs.parallelize(network(), ranks)
    built = build_optimizer(config.optimizer, model.parameters())
    schedule = build_schedule(config.optimizer, built, PER_EPOCH)
    about = DataCard(SHAPE[1:], SHAPE[1:], (), Parameters.normalised(("a", "b")))
    scaler = LossScaler(ranks, "float32")
    state = RunState(model, built, schedule, SHAPE[0], "", about, ranks.device, scaler)
    objective = Objective("mse")
    progress = Progress(config, ranks, state, Position())
    data: Any = Nothing()
    trainer = Trainer(config, ranks, objective, data=data, validation=data, progress=progress)
    feed = ((hs.shard(x, ranks), hs.shard(y, ranks)) for x, y in batches())
    weights = []
    for _ in range(STEPS):
        trainer.train_step(next(feed), feed)
        weights.append([p.detach().numpy().copy() for p in model.parameters()])
    return weights


@dataclass
class Reference:
    """The same in numpy: the network and its gradient by hand, LARC, Adam or SGD, the schedule."""

    optimizer: dict[str, Any]
    weights: list[Floats]
    first: list[Floats] = field(default_factory=list)
    second: list[Floats] = field(default_factory=list)

    def gradient(self, x: Floats, y: Floats) -> list[Floats]:
        w1, b1, w2, b2 = self.weights
        mean = x.mean((2, 3, 4))
        hidden = mean @ w1[:, :, 0, 0, 0].T + b1
        off = 2 * (hidden @ w2.T + b2 - y) / y.size
        back = off @ w2
        return [(back.T @ mean)[:, :, None, None, None], back.sum(0), off.T @ hidden, off.sum(0)]

    def factor(self, step: int) -> float:
        schedule = self.optimizer["schedule"]
        epoch = step / PER_EPOCH
        warm = min(1.0, epoch / schedule["warmup"]) if schedule.get("warmup") else 1.0
        if schedule["name"] == "steps":
            factors = {0: 1.0, **schedule["at"]}
            return warm * factors[max(start for start in factors if start <= epoch)]
        left = max(0.0, 1 - epoch / schedule["epochs"]) ** schedule.get("power", 1)
        return warm * (schedule["factor"] + (1 - schedule["factor"]) * left)

    def step(self, step: int, gradients: list[Floats]) -> None:
        if (most := self.optimizer.get("clip")) is not None:
            norm = np.sqrt(sum((g**2).sum() for g in gradients))
            gradients = [g * min(1.0, most / (norm + 1e-6)) for g in gradients]
        if "larc" in self.optimizer:
            gradients = [self.controlled(*pair) for pair in zip(self.weights, gradients)]  # noqa: B905
        rate = self.optimizer["learning_rate"] * self.factor(step)
        if not self.first:
            self.first = [np.zeros_like(g) for g in gradients]
            self.second = [np.zeros_like(g) for g in gradients]
        for i, g in enumerate(gradients):
            if self.optimizer.get("name") == "sgd":
                self.first[i] = 0.9 * self.first[i] + g
                self.weights[i] = self.weights[i] - rate * self.first[i]
                continue
            self.first[i] = 0.9 * self.first[i] + 0.1 * g
            self.second[i] = 0.999 * self.second[i] + 0.001 * g**2
            mean = self.first[i] / (1 - 0.9 ** (step + 1))
            square = self.second[i] / (1 - 0.999 ** (step + 1))
            self.weights[i] = self.weights[i] - rate * mean / (np.sqrt(square) + 1e-8)

    def controlled(self, w: Floats, g: Floats) -> Floats:
        numbers = {"trust": 0.002, "otherwise": 6.25e-5, **self.optimizer["larc"]}
        v, n = np.linalg.norm(w.ravel()), np.linalg.norm(g.ravel())
        local = numbers["trust"] * v / n if v != 0 and n != 0 else numbers["otherwise"]
        return min(local, 1.0) * g

    def run(self) -> list[list[Floats]]:
        feed = iter([(x.numpy(), y.numpy()) for x, y in batches()])
        count = self.optimizer.get("accumulate", 1)
        history = []
        for step in range(STEPS):
            parts = [self.gradient(*next(feed)) for _ in range(count)]
            self.step(step, [sum(group) / count for group in zip(*parts, strict=True)])
            history.append(list(self.weights))
        return history


def reference(optimizer: dict[str, Any]) -> list[list[Floats]]:
    return Reference(optimizer, [p.detach().numpy().copy() for p in network().parameters()]).run()


def check(optimizer: dict[str, Any], grid: dict[str, int]) -> None:
    expected = reference(optimizer)
    ranks = int(np.prod(list(grid.values()))) if grid else 1
    for found in run_ranks(ranks, trained, optimizer, grid):
        for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            for a, b in zip(mine, theirs, strict=True):
                assert np.linalg.norm(a - b) <= 1e-10 * np.linalg.norm(b), step


@pytest.mark.parametrize(
    ("grid", "name"),
    in_gate(
        [(grid, name) for grid in GRIDS for name in ("adam", "sgd")],
        kept=[(grid, ("adam", "sgd")[turn % 2]) for turn, grid in enumerate(GRIDS)],
    ),
    ids=str,
)
def test_larc_over_20_steps_on_every_grid(grid: dict[str, int], name: str) -> None:
    """With accumulation and clipping, so that their order tells."""
    check(
        {
            "name": name,
            "learning_rate": 0.05,
            "larc": {},
            "clip": 0.3,
            "accumulate": 2,
            "schedule": SCHEDULES[0],
        },
        grid,
    )


@pytest.mark.parametrize(
    ("schedule", "grid"),
    by_rotation(SCHEDULES, [{"data": 2, "width": 2}, {"height": 2}, {}]),
    ids=str,
)
def test_schedules_over_20_steps(schedule: dict[str, Any], grid: dict[str, int]) -> None:
    larc = {"trust": 0.7}
    check({"name": "adam", "learning_rate": 0.1, "larc": larc, "schedule": schedule}, grid)


def test_the_first_bias_changes_by_otherwise_alone() -> None:
    """What the comparisons above rest on: its norm is zero in the first step, and only then."""
    start = reference({"name": "sgd", "learning_rate": 1.0, "larc": {}, "schedule": SCHEDULES[0]})
    plain = reference({"name": "sgd", "learning_rate": 1.0, "schedule": SCHEDULES[0]})
    assert start[0][1] == pytest.approx(6.25e-5 * plain[0][1], rel=1e-12)
    assert start[1][1] != pytest.approx(6.25e-5 * plain[1][1], rel=1e-3)


def scaled(weight: list[float], gradient: list[float], **numbers: float) -> list[float]:
    parameter = nn.Parameter(torch.tensor(weight))
    parameter.grad = torch.tensor(gradient)
    scale_by_norms([parameter], **numbers)
    return parameter.grad.tolist()


def test_never_more_than_the_gradient() -> None:
    assert scaled([3.0, 4.0], [0.006, 0.008]) == pytest.approx([0.006, 0.008])  # trust v / g = 1
    assert scaled([3.0, 4.0], [0.0006, 0.0]) == pytest.approx([0.0006, 0.0])
    assert scaled([3.0, 4.0], [0.6, 0.8]) == pytest.approx([0.006, 0.008])


def test_zero_norms() -> None:
    assert scaled([0.0, 0.0], [1.0, 2.0]) == pytest.approx([6.25e-5, 1.25e-4])
    assert scaled([1.0, 2.0], [0.0, 0.0]) == [0.0, 0.0]
    assert scaled([0.0], [2.0], otherwise=3.0) == [2.0]  # clipped, too
    assert scaled([0.0], [0.0]) == [0.0]


def test_tiny_and_huge_numbers_have_norms() -> None:
    assert scaled([1e-25], [1e-24]) == pytest.approx([0.002e-25])
    assert scaled([1.0, 0.0], [3e30, 4e30]) == pytest.approx([0.0012, 0.0016])


@pytest.mark.parametrize("shape", [(3, 1000, 700), (5, 7, 3, 3, 3), (64, 32, 4, 4, 4), (1025,)])
@pytest.mark.parametrize("last", [False, True])
def test_norms_of_large_tensors_in_any_order(shape: tuple[int, ...], last: bool) -> None:
    """A plain sum in float32 is off by 1e-4 there."""
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=random)
    gradient = 50 * torch.randn(shape, generator=random)
    if last and len(shape) == 5:
        weight = weight.to(memory_format=torch.channels_last_3d)
        gradient = gradient.to(memory_format=torch.channels_last_3d)
    expected = gradient.double() * 0.002 * weight.double().norm() / gradient.double().norm()
    parameter = nn.Parameter(weight)
    parameter.grad = gradient.clone(memory_format=torch.preserve_format)
    scale_by_norms([parameter])
    torch.testing.assert_close(parameter.grad.double(), expected, rtol=2e-7, atol=0)
    parameter.grad = gradient.expand(2, *shape)[0]
    scale_by_norms([parameter])
    torch.testing.assert_close(parameter.grad.double(), expected, rtol=2e-7, atol=0)


def test_what_is_no_number_stays_so() -> None:
    assert np.isnan(scaled([1.0, 2.0], [float("nan"), 1.0])).all()
    assert np.isnan(scaled([float("nan")], [1.0])).all()
    assert np.isnan(scaled([1.0, 2.0], [float("inf"), 1.0])[0])


def test_without_gradient_nothing_is_done() -> None:
    frozen = nn.Parameter(torch.ones(2))
    scale_by_norms([frozen])
    scale_by_norms([])
    assert frozen.grad is None


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_norms_far_from_one(size: float) -> None:
    """Numbers whose squares float32 cannot hold."""
    weight = nn.Parameter(torch.linspace(1, 2, 3 * 1024 + 5))
    weight.grad = torch.full_like(weight, size)
    exact = weight.grad.numpy().astype(np.float64)
    norm = np.linalg.norm(weight.detach().numpy().astype(np.float64))
    expected = exact * min(0.002 * norm / np.linalg.norm(exact), 1)
    scale_by_norms([weight])
    np.testing.assert_allclose(weight.grad.numpy(), expected, rtol=1e-6)
