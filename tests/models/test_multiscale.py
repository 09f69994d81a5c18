"""`MultiscaleNet` by itself, and on cut volumes of awkward extents (tier: a few ranks)."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch

import hyperslab as hs
from hyperslab.models.multiscale import SettledNorm
from hyperslab.recipe.load import load_recipe
from tests.models.test_unet3d_cut import error, worst_gradient
from tests.ranks import run_ranks

CHANNELS = (3, 5)


def network() -> hs.models.MultiscaleNet:
    model = hs.models.MultiscaleNet(2, 3, channels=CHANNELS, hidden=7).double()
    torch.nn.init.normal_(model.head[-1].weight)
    return model


def differences(grid_of: dict[str, int], extents: tuple[int, ...]) -> tuple[float, float]:
    """Relative errors of the predictions and of the worst gradient."""
    grid = hs.Grid(**grid_of)
    plain = network()
    cut = hs.parallelize(copy.deepcopy(plain), grid)
    x = torch.randn(4, 2, *extents, dtype=torch.float64)
    expected = plain(x)
    expected.square().mean().backward()
    y = cut(hs.shard(x, grid))
    y.square().mean().backward()
    return error(y.full(), expected), worst_gradient(cut, plain)


@pytest.mark.parametrize(
    ("grid", "extents"),
    [
        ({"depth": 2}, (13, 10, 11)),
        ({"data": 2, "width": 2}, (7, 5, 9)),
        ({"depth": 3}, (11, 8, 8)),
    ],
    ids=str,
)
def test_predictions_and_gradients_are_the_serial_ones(
    grid: dict[str, int], extents: tuple[int, ...]
) -> None:
    for predictions, gradient in run_ranks(math.prod(grid.values()), differences, grid, extents):
        assert predictions < 1e-10
        assert gradient < 1e-10


def test_a_periodic_volume_has_no_first_voxel() -> None:
    torch.manual_seed(0)
    model = network().eval()
    x = torch.randn(2, 2, 16, 12, 8, dtype=torch.float64)
    moved = x.roll((4, -8, 4), (2, 3, 4))
    torch.testing.assert_close(model(moved), model(x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model(x.flip(1)), model(x), rtol=1e-3)  # it does look


def test_statistics_of_features_settle() -> None:
    torch.manual_seed(0)
    norm = SettledNorm(3, batches=2)
    first, second, other = (torch.randn(5, 3) + shift for shift in (0, 2, 9))
    assert norm(first).mean().abs() < 1e-6
    norm(second[:1])  # the end of an epoch, which does not count
    norm(second)
    torch.testing.assert_close(norm.running_mean, (first.mean(0) + second.mean(0)) / 2)
    torch.testing.assert_close(norm.running_var, (first.var(0) + second.var(0)) / 2)
    state = copy.deepcopy(norm.state_dict())
    trained = norm(other)
    torch.testing.assert_close(norm.eval()(other), trained)
    for key, value in norm.state_dict().items():
        assert torch.equal(value, state[key])
    fresh = SettledNorm(3, batches=2)
    norm.train().load_state_dict(fresh.state_dict())  # settles anew
    assert norm(other).mean().abs() < 1e-6
    fresh.load_state_dict(state)
    torch.testing.assert_close(fresh(other), trained)


def test_a_recipe_names_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {name: multiscale, channels: [3, 5], periodic: false}\n"
        "data: {synthetic: {width: 8, channels: 2}, batch_size: 2}\n"
    )
    made = load_recipe(path).model.build((2, 8, 8, 8), 3, where="data")
    assert isinstance(made, hs.models.MultiscaleNet)
    assert made(torch.rand(2, 2, 8, 8, 8)).shape == (2, 3)
    with pytest.raises(hs.RecipeError, match=r"batch_size=1.*multiscale.*needs 2 samples"):
        load_recipe(path, ["data.batch_size=1"])
    with pytest.raises(hs.RecipeError, match=r"2 stages.*at least 4 voxels.*\[8, 2, 8\]"):
        load_recipe(path).model.build((2, 8, 2, 8), 3, where="data")


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="need 1"):
        hs.models.MultiscaleNet(channels=(8, 0))
