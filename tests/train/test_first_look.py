"""What is said of a network of anybody's when it first runs (tiers: one process; a few ranks)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hyperslab.checkpoint.run_state import DataCard
from hyperslab.errors import RecipeError
from hyperslab.formats.targets import Parameters
from hyperslab.planner.job import job_of
from hyperslab.planner.trace import trace_step
from hyperslab.recipe.load import load_recipe
from hyperslab.train.network import check_first_pass, multiple_that_fits
from hyperslab.train.run import train
from tests.ranks import run_ranks
from tests.train.scans import write_scans
from tests.train.test_targets import segresnet

CLASSES = ("background", "liver")


class Halving(nn.Module):
    """Halves its input ``times``, doubles it again, and adds what was there before."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv3d(2, 2, 3, 2, 1) for _ in range(times))
        self.norm = nn.BatchNorm3d(2)
        self.first = nn.Conv3d(1, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [self.norm(self.first(x))]
        for part in self.down:
            kept.append(part(kept[-1]))
        y = kept.pop()
        while kept:
            y = nn.functional.interpolate(y, scale_factor=2.0) + kept.pop()
        return y


class Strict(Halving):
    """Looks at its input before it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[2] % (1 << len(self.down)):
            raise ValueError("odd extents")
        return super().forward(x)


def card(shape: tuple[int, ...], classes: tuple[str, ...] = CLASSES) -> DataCard:
    return DataCard(shape, shape, classes, Parameters.normalised(()))


@pytest.mark.parametrize(
    ("times", "extents", "multiple"),
    [
        (3, (14, 16, 16), 8),  # 4 would do here, and not for the next scan
        (2, (35, 37, 37), 4),
        (1, (9, 9, 9), 2),
        (2, (8, 16, 12), None),  # it fits
    ],
)
def test_the_least_multiple_is_found(
    times: int, extents: tuple[int, ...], multiple: int | None
) -> None:
    network = Halving(times)
    found = multiple_that_fits(network, (2, 1, *extents), card((1, *extents)))
    assert found == multiple


@pytest.mark.parametrize("forward", [lambda x: x, lambda x: x @ x.mean(), lambda x: None])
def test_there_is_none_for_what_is_wrong_otherwise(
    forward: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert multiple_that_fits(forward, (1, 1, 9, 9, 9), card((1, 9, 9, 9))) is None


def test_looking_for_it_changes_nothing(tmp_path: Path) -> None:
    network = Strict(2)
    recipe = load_recipe(segresnet(tmp_path / "run.yaml", tmp_path))
    before = {key: value.clone() for key, value in network.state_dict().items()}
    check_first_pass(network, recipe, card((1, 9, 9, 9)))
    with pytest.raises(RecipeError, match="multiples of 4"):
        network(torch.zeros(1, 1, 9, 9, 9))
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    network(torch.zeros(1, 1, 8, 8, 8))
    assert network.norm.num_batches_tracked == 1


def run(recipe: Path, *overrides: str) -> None:
    train(load_recipe(recipe, overrides))


def test_extents_that_do_not_suit_a_network_are_met_with_the_remedy(tmp_path: Path) -> None:
    data = write_scans(tmp_path / "d", 6, shape=(15, 15, 15))
    path = segresnet(tmp_path / "odd.yaml", data, epochs=1)
    words = r"SegResNet fails on .*\[4, 1, 15, 15, 15\].*\n.*multiples of 2: set data\.multiple: 2"
    with pytest.raises(RecipeError, match=words):
        run(path)
    with pytest.raises(RecipeError, match=words):
        trace_step(job_of(load_recipe(path)).workload(), {"depth": 2})
    run_ranks(2, run, path, "grid.depth=2", "data.multiple=2", "output=" + str(tmp_path / "even"))
