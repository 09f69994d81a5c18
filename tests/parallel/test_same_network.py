"""Networks that differ between ranks are refused by name (tier: two gloo ranks)."""

from __future__ import annotations

import pytest
from torch import nn

import hyperslab as hs
from tests.ranks import run_ranks


class Own(nn.Module):
    """A layer of a user's, which says on every rank which one it is."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.conv = nn.Conv3d(1, 2, 3)

    def extra_repr(self) -> str:
        return f"rank={self.rank}"


def network(rank: int, case: str) -> nn.Module:
    other = rank == 1
    return nn.Sequential(
        nn.Conv3d(
            1, 4 if other and case == "width" else 2, 3, stride=1 + (case == "stride") * rank
        ),
        nn.BatchNorm3d(4 if other and case == "width" else 2),
        nn.Dropout3d(0.5 if other and case == "dropout" else 0.1),
        nn.LeakyReLU() if other and case == "activation" else nn.ReLU(),
        Own(rank) if case == "own" else nn.Identity(),
    )


CASES = {
    "width": 'tensors.0.weight: "(2, 1, 3, 3, 3) torch.float32" on rank 0, "(4, 1,',
    "stride": "layers.0: ",
    "dropout": 'layers.2: "Dropout3d(p=0.1, inplace=False)" on rank 0, "Dropout3d(p=0.5, inplace=',
    "activation": 'layers.3: "ReLU()" on rank 0, "LeakyReLU(negative_slope=0.01)" on rank 1',
    "frozen": 'tensors.0.weight: "(2, 1, 3, 3, 3) torch.float32" on rank 0, "(2, 1, 3, 3, 3) torch',
    "batch_norm": 'options.batch_norm: "grid" on rank 0, "replica" on rank 1',
}


def refusals() -> dict[str, str]:
    grid = hs.Grid(depth=2)
    found = {}
    for case in (*CASES, "own", "same"):
        module = network(grid.rank, case)
        module[0].weight.requires_grad = not (case == "frozen" and grid.rank == 1)
        batch_norm = "replica" if case == "batch_norm" and grid.rank == 1 else "grid"
        try:
            hs.parallelize(module, grid, batch_norm=batch_norm)
        except hs.LayoutError as error:
            found[case] = str(error)
    return found


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    first, second = run_ranks(2, refusals)
    assert first == second
    return first


@pytest.mark.parametrize("case", CASES)
def test_a_difference_is_named(refused: dict[str, str], case: str) -> None:
    assert refused[case].startswith(f"the ranks' Sequential differ in {CASES[case]}")
    assert "build the same network on every rank" in refused[case]


def test_what_is_the_same_or_a_users_own_is_fine(refused: dict[str, str]) -> None:
    assert refused.keys() == CASES.keys()
