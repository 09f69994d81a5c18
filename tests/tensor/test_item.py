"""A tensor that is not cut goes to NumPy, matplotlib and files (tiers: no process; two ranks)."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch

import hyperslab as hs
from tests.ranks import run_ranks

mpl.use("Agg")
COVERS = {"value": {"numpy", "tolist", "__array__", "__reduce_ex__"}}
FULL = torch.arange(2 * 3 * 4 * 4.0).view(2, 3, 4, 4)


def copied(x: Any) -> torch.Tensor:
    """By `__reduce_ex__`, whose name is what `__array__` is for NumPy."""
    found: torch.Tensor = copy.copy(x)
    return found


def saved(x: Any) -> torch.Tensor:
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    found: torch.Tensor = torch.load(file, weights_only=True)["x"]
    assert type(found) is torch.Tensor
    return found


def drawn(x: Any) -> Any:
    from matplotlib.figure import Figure

    axes = Figure().subplots(1, 3)
    axes[1].plot(x[0, 0, 0])
    axes[2].hist(x[0, 0, 0])
    return axes[0].imshow(x[0, 0]).get_array().data


WAYS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "asarray": (np.asarray, FULL.numpy()),
    "array of a type": (lambda x: np.asarray(x, dtype=np.float64), FULL.double().numpy()),
    "numpy": (lambda x: x.numpy(), FULL.numpy()),
    "a gradient": (lambda x: (x * 1).requires_grad_().detach().cpu().numpy(), FULL.numpy()),
    "tolist": (lambda x: x.tolist(), FULL.tolist()),
    "save": (saved, FULL),
    "copy": (copied, FULL),
    "matplotlib": (drawn, FULL[0, 0].numpy()),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
@pytest.mark.parametrize("way", WAYS)
def test_on_one_rank(way: str) -> None:
    take, expected = WAYS[way]
    found = take(hs.shard(FULL, hs.Grid()))
    assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_a_gradient_is_refused_in_torchs_words() -> None:
    x = hs.shard(FULL, hs.Grid()).requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        np.asarray(x)


def test_a_number_is_formatted() -> None:
    x = hs.shard(FULL, hs.Grid())
    assert f"{x[0, 0, 1, 1]:.2f}" == "5.00"
    assert f"{x[0, 0]}".startswith("Sharded(")


def of_two_ranks(way: str) -> None:
    grid = hs.Grid(height=2)
    x = hs.shard(FULL, grid)
    take, expected = WAYS[way]
    whole = hs.gather(x, "height")
    assert np.array_equal(np.asarray(take(whole)), np.asarray(expected))
    take(x)


@pytest.mark.parametrize("way", ["asarray", "numpy", "tolist", "save"])
def test_a_cut_one_is_refused(way: str) -> None:
    with pytest.raises(hs.UnsupportedOp, match=r"(?s)holds only a part .*x\.full\(\)"):
        run_ranks(2, of_two_ranks, way)
