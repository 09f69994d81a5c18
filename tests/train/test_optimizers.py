"""Optimizer and learning rate against the formulas of the papers (tier: no process)."""

from __future__ import annotations

import pytest
import torch

from hyperslab.recipe.optimizer import AdamSection, SGDSection, TargetOptimizer
from hyperslab.recipe.schedule import LinearSchedule, StepSchedule
from hyperslab.train.optimizer import build_optimizer, build_schedule


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [(0, 1.0), (50, 0.505), (25, 0.7525), (99.5, 0.01495), (100, 0.01), (129.9, 0.01)],
)
def test_linear_decay_to_a_hundredth_in_100_epochs(epoch: float, expected: float) -> None:
    assert LinearSchedule().factor_at(epoch) == pytest.approx(expected)


def test_mlperf_warms_up_and_drops() -> None:
    schedule = StepSchedule(name="steps", warmup=4, at={32: 0.25, 64: 0.125})
    at = [schedule.factor_at(epoch) for epoch in (0, 1, 3, 4, 31.99, 32, 63, 64, 100)]
    assert at == [0, 0.25, 0.75, 1, 1, 0.25, 0.25, 0.125, 0.125]


def test_the_rate_of_each_step() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    config = AdamSection(learning_rate=0.5, schedule=LinearSchedule(epochs=2, factor=0.1))
    optimizer = build_optimizer(config, [weight])
    schedule = build_schedule(config, optimizer, 3)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        weight.grad = torch.ones(1)
        optimizer.step()
        schedule.step()
    expected = [0.5 * (1 - 0.9 * min(step / 6, 1)) for step in range(8)]
    assert rates == pytest.approx(expected)


def test_the_numbers_reach_torch() -> None:
    adam = build_optimizer(
        AdamSection(betas=(0.8, 0.9), eps=1e-3), [torch.nn.Parameter(torch.ones(1))]
    )
    assert adam.defaults["betas"] == (0.8, 0.9)
    assert adam.defaults["eps"] == 1e-3
    sgd = build_optimizer(SGDSection(name="sgd", momentum=0.7), [torch.nn.Parameter(torch.ones(1))])
    assert isinstance(sgd, torch.optim.SGD)
    assert sgd.defaults["momentum"] == 0.7


class OnCuda(torch.nn.Parameter):
    """A weight that says that it is on a CUDA device."""

    is_cuda = True


TARGET = {"name": "target", "learning_rate": 0.1}


@pytest.mark.parametrize(
    ("section", "fused"),
    [
        (AdamSection(), True),
        (SGDSection(name="sgd"), True),
        (TargetOptimizer(**TARGET, target="torch.optim.AdamW"), True),
        (TargetOptimizer(**TARGET, target="torch.optim.AdamW", arguments={"foreach": True}), None),
        (TargetOptimizer(**TARGET, target="torch.optim.AdamW", arguments={"fused": False}), False),
        (TargetOptimizer(**TARGET, target="torch.optim.RMSprop"), None),
    ],
    ids=str,
)
def test_one_kernel_updates_all_weights(section, fused) -> None:  # type: ignore[no-untyped-def]
    for weight in (OnCuda(torch.ones(3)), torch.nn.Parameter(torch.ones(3))):
        (group,) = section.build([weight]).param_groups
        assert group.get("fused") is fused
    if fused is not False:  # weights that have no such kernel
        for other in (
            OnCuda(torch.ones(3, dtype=torch.cfloat)),
            torch.nn.Parameter(torch.ones(3, device="meta")),
        ):
            (group,) = section.build([other]).param_groups
            assert group.get("fused") is None
