"""Views that a tensor itself becomes, diagonals and meshes (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hyperslab as hs
from hyperslab.geometry import Cut, Partition
from tests.ops.serial import Example, compare
from tests.ranks import run_ranks

COVERS = {
    "views": {
        "unsqueeze_",
        "squeeze_",
        "transpose_",
        "swapaxes_",
        "swapdims_",
        "t_",
        "diagonal",
        "meshgrid",
    }
}

CALLS: dict[str, tuple[str, tuple[int, ...]]] = {
    "in front": ("unsqueeze_", (0,)),
    "behind": ("unsqueeze_", (-1,)),
    "any of one": ("squeeze_", ()),
    "one": ("squeeze_", (1,)),
    "not of one": ("squeeze_", (2,)),
    "transposed": ("transpose_", (0, 2)),
    "axes": ("swapaxes_", (1, -1)),
    "dims": ("swapdims_", (4, 3)),
}


def changed(x: Any, *, call: str) -> Any:
    """A view sees what is written after its base has another shape, and the base's gradient."""
    name, args = CALLS[call]
    y = x * 2
    view = y[:, 0]
    assert getattr(y, name)(*args) is y
    y.mul_(3)
    return y * 2 + view.sum()


def matrix(x: Any) -> Any:
    y = x[:, 0, :, 0, 0] * 2
    return y.t_().mul_(3)


def test_the_tensor_becomes_the_view() -> None:
    for axes in ({"depth": 2}, {"height": 2}):
        examples = [Example(axes, (2, 1, 4, 3, 2), options={"call": call}) for call in CALLS]
        run_ranks(2, compare, changed, examples)
    run_ranks(2, compare, matrix, [Example({"data": 2}, (3, 2, 4, 1, 1))])


def one_sample() -> None:
    """Of a batch of one, which one rank has, squeeze makes a copy: no rank fails alone."""
    whole = Partition((1, 3, 4), (Cut("data", (0, 1, 1)), None, None))
    x = hs.shard(torch.randn(1, 3, 4), hs.Grid(data=2)).redistribute(whole)
    assert torch.equal(x.squeeze(0).full(), x.full()[0])
    with pytest.raises(hs.LayoutError, match="squeeze_ in place, on a copy"):
        x.squeeze_(0)
    leaf = x.detach().requires_grad_()
    with pytest.raises(RuntimeError, match="leaf that requires grad"):
        leaf.unsqueeze_(0)
    y = leaf * 1
    with torch.no_grad(), pytest.raises(hs.LayoutError, match="its gradient would have other dims"):
        y.transpose_(1, 2)


def test_one_sample_on_one_rank() -> None:
    run_ranks(2, one_sample)


def diagonals(x: Any, *, args: tuple[int, ...]) -> Any:
    return torch.diagonal(x * 2, *args) * 3 + (x * 2).diagonal(*args)


def test_diagonals() -> None:
    cases = [(), (1, 0, 1), (-1, 4, 1), (0, -1, 0)]
    run_ranks(
        2,
        compare,
        diagonals,
        [Example({"depth": 2}, (3, 4, 5, 3, 2), options={"args": args}) for args in cases],
    )
    x = hs.shard(torch.randn(1, 1, 4, 4, 4), hs.Grid())
    assert x.diagonal(0, 2, 3).shape == (1, 1, 4, 4)
    with pytest.raises(hs.LayoutError, match=r"diagonal of dim 2, 3, which is cut"):
        run_ranks(2, diagonal_of_a_cut_dim)


def diagonal_of_a_cut_dim() -> None:
    hs.shard(torch.randn(1, 1, 4, 4, 4), hs.Grid(depth=2)).diagonal(0, 2, 3)


def mesh(x: Any, weight: torch.Tensor, *, indexing: str, as_list: bool) -> Any:
    vectors = [x[0, 0, :, 0, 0], weight, x[1, 0, :, 1, 0], x[0, 1, 0, :, 0]]
    found = torch.meshgrid(*([vectors] if as_list else vectors), indexing=indexing)
    return found[0] * found[1] * 2 + found[2] * found[3]


@pytest.mark.parametrize("indexing", ["ij", "xy"])
def test_meshes(indexing: str) -> None:
    cases = [
        Example(
            {"depth": 2, "height": 2},
            (2, 2, 5, 4, 1),
            weights=((3,),),
            options={"indexing": indexing, "as_list": as_list},
        )
        for as_list in (False, True)
    ]
    run_ranks(4, compare, mesh, cases)
