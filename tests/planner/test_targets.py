"""Plans for recipes that name anybody's networks, losses and optimizers (tier: no process)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hyperslab.errors import UnsupportedOp
from hyperslab.planner.job import job_of
from hyperslab.planner.trace import trace_step
from hyperslab.recipe.load import recipe_of_values
from hyperslab.recipe.trust import Trust

OWN = Trust(own=True)


def values(optimizer: str) -> dict[str, Any]:
    return {
        "model": {
            "target": "monai.networks.nets.SegResNet",
            "spatial_dims": 3,
            "in_channels": "${data.channels}",
            "out_channels": "${data.outputs}",
            "init_filters": 8,
            "blocks_down": [1],
            "blocks_up": [],
        },
        "data": {"synthetic": {"width": 8, "channels": 1, "classes": 3}, "batch_size": 2},
        "loss": {"target": "monai.losses.DiceCELoss", "to_onehot_y": True, "softmax": True},
        "optimizer": {"name": optimizer},
        "output": str(Path("out")),
        "device": "cpu",
    }


@pytest.mark.parametrize(
    "optimizer",
    ["adamw", "adadelta", "adagrad", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop"],
)
def test_a_step_of_it_is_traced(optimizer: str) -> None:
    recipe = recipe_of_values(values(optimizer), "f", trust=OWN)
    work = job_of(recipe).workload()
    trace = trace_step(work, {"depth": 2} if optimizer == "adamw" else {})
    names = {operator.call.name for operator in trace.operators}
    assert any("conv" in name for name in names)
    assert trace.gradients > 0
    assert any(operator.stage == "optimizer" for operator in trace.operators)


def test_an_optimizer_that_looks_at_values_is_refused_by_name() -> None:
    work = job_of(recipe_of_values(values("adafactor"), "f", trust=OWN)).workload()
    with pytest.raises(UnsupportedOp, match="the optimizer Adafactor looks at values in its step"):
        trace_step(work, {})


def test_a_loss_of_one_hot_codes_is_traced() -> None:
    """Such as MONAI's without ``to_onehot_y``; torch's own ``one_hot`` reads the classes."""
    loss = {"target": "monai.losses.DiceLoss", "softmax": True}
    work = job_of(recipe_of_values({**values("adamw"), "loss": loss}, "f", trust=OWN)).workload()
    assert trace_step(work, {"depth": 2}).operators
