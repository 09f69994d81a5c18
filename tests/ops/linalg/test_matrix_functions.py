"""Functions of whole matrices, many beside each other (tier: a few gloo ranks)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hyperslab as hs
from tests.ops.serial import Example, compare
from tests.ranks import run_ranks

COVERS = {
    "linalg": {
        "cholesky",
        "det",
        "eigh",
        "eigvalsh",
        "inv",
        "inverse",
        "logdet",
        "matrix_exp",
        "pinv",
        "pinverse",
        "qr",
        "slogdet",
        "solve",
        "solve_triangular",
        "svd",
        "svdvals",
    }
}

CALLS: dict[str, Callable[[Any], Any]] = {
    "cholesky": torch.linalg.cholesky,
    "det": lambda a: a.det() + torch.det(input=a),
    "eigh": lambda a: torch.linalg.eigh(a)[1].abs() * torch.linalg.eigh(a).eigenvalues[..., None],
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a, UPLO="U"),
    "inverse": lambda a: a.inverse() + torch.linalg.inv(A=a),
    "matrix_exp": lambda a: torch.matrix_exp(a.contiguous()),
    "pinv": lambda a: torch.linalg.pinv(a, hermitian=True),
    "qr": lambda a: torch.linalg.qr(a, mode="reduced").R.abs(),
    "slogdet": lambda a: torch.slogdet(a)[1] + torch.logdet(a),
    "svd": lambda a: torch.linalg.svd(a, full_matrices=False).S + torch.linalg.svdvals(a),
    "solve": lambda a: torch.linalg.solve(a, a[..., :2].exp()),
    "solve_triangular": lambda a: torch.linalg.solve_triangular(a.tril(), a * 2, upper=False),
}


def of_voxels(x: Any, *, call: str) -> Any:
    """Of a matrix for each voxel, and one for each sample."""
    eye = torch.eye(3, dtype=x.dtype) * torch.arange(4, 7, dtype=x.dtype)
    field = x.movedim(1, -1)
    each = CALLS[call](field.unsqueeze(-1) * field.unsqueeze(-2) / 9 + eye)
    rows = x.flatten(2)
    sample = CALLS[call](rows @ rows.mT / rows.shape[-1] + eye)
    return torch.cat([y.reshape(x.shape[0], -1) for y in (each, sample)], 1)


@pytest.mark.parametrize("call", CALLS)
def test_equal_to_serial(call: str) -> None:
    for axes in ({"depth": 2, "width": 2}, {"data": 2, "height": 2}):
        run_ranks(4, compare, of_voxels, [Example(axes, (3, 3, 3, 4, 2), options={"call": call})])


def mixed(x: Any, weight: torch.Tensor, *, way: str) -> Any:
    """Channels of all voxels by one matrix, as an invertible layer and its inverse do."""
    matrix = weight + 3 * torch.eye(3, dtype=x.dtype)
    if way == "one":
        return torch.linalg.solve(matrix, x.flatten(2))
    if way == "triangular":
        return torch.linalg.solve_triangular(matrix.triu(), x.flatten(2), upper=True)
    own = matrix * (1 + x[..., 0].mean((1, 2, 3))[:, None, None].sigmoid())
    return torch.linalg.solve(own, x.flatten(2))


@pytest.mark.parametrize("way", ["one", "triangular", "each"])
def test_columns_stay_cut(way: str) -> None:
    for axes in ({"depth": 2, "width": 2}, {"data": 2, "height": 2}):
        example = Example(axes, (3, 3, 3, 4, 2), weights=((3, 3),), options={"way": way})
        run_ranks(4, compare, mixed, [example])


def refused() -> None:
    x = hs.shard(torch.randn(2, 3, 4, 3, 3), hs.Grid(depth=2))
    eye = torch.eye(3)
    for call in (
        lambda: torch.linalg.solve(eye, x[:, :, 0], left=False),
        lambda: torch.linalg.solve(x, torch.ones(2, 3, 4, 3)),
        lambda: torch.linalg.pinv(x, x[:, :, :, 0, 0]),
        lambda: torch.linalg.det(x[0, 0, 0, 0]),
    ):
        with pytest.raises(hs.LayoutError, match="takes"):
            call()


def test_what_is_refused() -> None:
    run_ranks(2, refused)
