"""`MultiscaleNet` by itself, and on cut volumes of awkward extents (tier: a few ranks)."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch

import hyperslab as hs
from hyperslab.models.multiscale import SettledNorm
from hyperslab.models.summary_statistics import summary_count, summary_statistics
from hyperslab.recipe.load import load_recipe
from tests.models.test_unet3d_cut import error, worst_gradient
from tests.ops.serial import Example, compare
from tests.ranks import run_ranks

CHANNELS = (3, 5)


def network(summary_width: int | None = None) -> hs.models.MultiscaleNet:
    model = hs.models.MultiscaleNet(
        2, 3, channels=CHANNELS, hidden=7, summary_width=summary_width
    ).double()
    torch.nn.init.normal_(model.head[-1].weight)
    return model


def differences(
    grid_of: dict[str, int], extents: tuple[int, ...], summary_width: int | None
) -> tuple[float, float]:
    """Relative errors of the predictions and of the worst gradient."""
    grid = hs.Grid(**grid_of)
    plain = network(summary_width)
    cut = hs.parallelize(copy.deepcopy(plain), grid)
    x = torch.randn(4, 2, *extents, dtype=torch.float64)
    expected = plain(x)
    expected.square().mean().backward()
    y = cut(hs.shard(x, grid))
    y.square().mean().backward()
    return error(y.full(), expected), worst_gradient(cut, plain)


@pytest.mark.parametrize(
    ("grid", "extents", "summary_width"),
    [
        ({"depth": 2}, (13, 10, 11), None),
        ({"data": 2, "width": 2}, (7, 5, 9), 8),
        ({"depth": 3}, (11, 8, 8), None),
        ({"height": 3}, (8, 11, 8), 11),
        ({"depth": 2, "height": 2}, (8, 8, 8), 8),
    ],
    ids=str,
)
def test_predictions_and_gradients_are_the_serial_ones(
    grid: dict[str, int], extents: tuple[int, ...], summary_width: int | None
) -> None:
    ranks = math.prod(grid.values())
    for predictions, gradient in run_ranks(ranks, differences, grid, extents, summary_width):
        assert predictions < 1e-10
        assert gradient < 1e-10


def of_counts(x: torch.Tensor) -> torch.Tensor:
    found = summary_statistics(torch.log1p(3 * x.abs()), 8)
    assert not isinstance(found, hs.Sharded) or set(found.partition.axes) <= {"data"}
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_summary_statistics_and_their_gradients_are_the_serial_ones(ranks: int) -> None:
    cases: dict[int, list[tuple[dict[str, int], tuple[int, ...]]]] = {
        2: [({"depth": 2}, (8, 8, 8)), ({"width": 2}, (5, 4, 7))],
        3: [({"height": 3}, (7, 5, 6))],
        4: [({"data": 2, "height": 2}, (6, 5, 9)), ({"height": 2, "width": 2}, (7, 8, 5))],
        8: [({"depth": 2, "height": 2, "width": 2}, (5, 6, 7))],
    }
    examples = [
        Example(grid, (3, channels, *extents))
        for grid, extents in cases[ranks]
        for channels in (1, 3)
    ]
    run_ranks(ranks, compare, of_counts, examples)


@pytest.mark.parametrize("summary_width", [None, 16])
def test_a_periodic_volume_has_no_first_voxel(summary_width: int | None) -> None:
    torch.manual_seed(0)
    model = network(summary_width).eval()
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
    for sizes in ({"channels": (8, 0)}, {"summary_width": 0}):
        with pytest.raises(ValueError, match="need 1"):
            hs.models.MultiscaleNet(**sizes)


def test_summary_statistics_change_features_alone() -> None:
    """No key of a checkpoint is another, and a network without them is what it was."""
    plain, more = network(), network(8)
    assert plain.state_dict().keys() == more.state_dict().keys()
    count = summary_count(2, 8)
    assert count == 2 * 2 + 2 * 2 * (4 + 9) + 2 * 3 * 9 + 2 * 3 * 28
    own = 2 * (2 + sum(CHANNELS))
    assert (plain.norm.num_features, more.norm.num_features) == (own, own + count)
    seen = []
    more.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    counts = torch.poisson(torch.full((2, 2, 8, 8, 8), 1.0))
    x = torch.log1p(counts)
    with torch.autocast("cpu", torch.bfloat16):
        more.float()(x)
    assert seen[0].dtype == torch.float32
    torch.testing.assert_close(seen[0][:, own:], summary_statistics(x, 8))


def test_recipes_with_summary_statistics_take_logarithms_of_counts(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {name: multiscale, channels: [3, 5], summary_statistics: true}\n"
        "data: {synthetic: {width: 8, channels: 2}, batch_size: 2}\n"
    )
    made = load_recipe(path).model.build((2, 8, 4, 8), 3, where="data")
    assert isinstance(made, hs.models.MultiscaleNet)
    assert made.summary_width == 8
    assert load_recipe(path, ["data.transform=log1p_mean"])
    alone = load_recipe(path, ["model.channels=[]"]).model.build((2, 8, 4, 8), 3, where="data")
    assert isinstance(alone, hs.models.MultiscaleNet)
    x = torch.log1p(torch.poisson(torch.full((2, 2, 8, 4, 8), 3.0)))
    features = alone.features(x)  # of the volume, without a weight
    torch.testing.assert_close(features[:, 4:], summary_statistics(x, 8))
    torch.testing.assert_close(features[:, :2], x.mean((2, 3, 4)))
    assert alone(x).shape == (2, 3)
    for other in ("transform=mean", "transform=null", "window=[0,9]"):
        with pytest.raises(hs.RecipeError, match=r"summary_statistics are those of log"):
            load_recipe(path, [f"data.{other}"])
