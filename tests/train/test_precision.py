"""What torch computes in during a run; the scale of float16 (tiers: one process; gloo ranks)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import hyperslab as hs
from hyperslab.checkpoint.files import verify_checksums
from hyperslab.checkpoint.retention import latest
from hyperslab.checkpoint.save_load import read_extra_values
from hyperslab.recipe.schema import Recipe
from hyperslab.train.flops import measure_peak
from hyperslab.train.step import PRECISIONS, LossScaler, arithmetic, autocast, float32_products
from tests.ranks import run_ranks
from tests.recipe.own_classes import Blobs, Net
from tests.selection import by_rotation

BACKENDS = torch.backends


def switches() -> tuple[Any, ...]:
    """Torch's switches of both generations, for products of matrices and for convolutions."""
    return (
        BACKENDS.cuda.matmul.fp32_precision,
        BACKENDS.cudnn.conv.fp32_precision,
        BACKENDS.cuda.matmul.allow_tf32,
        BACKENDS.cudnn.allow_tf32,
    )


EXACT = ("ieee", "ieee", False, False)
TF32 = ("tf32", "tf32", True, True)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_float32_means_one_thing_in_all_products(precision: str) -> None:
    before = switches()
    expected = TF32 if precision == "tf32" else EXACT
    with autocast(torch.device("cpu"), precision):
        assert switches() == expected
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == (
            PRECISIONS[precision] or torch.float32
        )
    assert switches() == before
    with pytest.raises(ZeroDivisionError), float32_products(precision):
        1 / 0  # noqa: B018
    assert switches() == before


def test_switches_of_the_user_come_back() -> None:
    conv = BACKENDS.cudnn.conv.fp32_precision, BACKENDS.cudnn.allow_tf32
    matmul = BACKENDS.cuda.matmul.fp32_precision, BACKENDS.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = False
        own = switches()
        with float32_products("tf32"):
            assert switches() == TF32
        assert switches() == own
        with float32_products("float32"):
            assert switches() == EXACT
        assert switches() == own
    finally:
        BACKENDS.cuda.matmul.allow_tf32, BACKENDS.cudnn.allow_tf32 = matmul[1], conv[1]
        BACKENDS.cuda.matmul.fp32_precision, BACKENDS.cudnn.conv.fp32_precision = matmul[0], conv[0]


@pytest.mark.parametrize(
    ("kernels", "same_shapes", "tries"),
    [("measure", True, True), ("measure", False, False), ("fixed", True, False)],
)
def test_cudnn_tries_its_algorithms_where_shapes_stay(
    kernels: str, same_shapes: bool, tries: bool
) -> None:
    data = {"synthetic": {"width": 8}, "batch_size": 1}
    recipe = Recipe.model_validate({"data": data, "output": "nowhere", "kernels": kernels})
    for before in (False, True):
        with BACKENDS.cudnn.flags(benchmark=before, allow_tf32=True):
            with arithmetic(recipe, same_shapes=same_shapes):
                assert BACKENDS.cudnn.benchmark is tries
            assert BACKENDS.cudnn.benchmark is before
            with arithmetic(recipe.model_copy(update={"kernels": "torch"}), same_shapes=True):
                assert BACKENDS.cudnn.benchmark is before


class Watching(Net):
    """Notes the switches of its forward passes."""

    seen: list[Any]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(switches())
        return super().forward(x)


def seen_in_run(folder: Path, precision: str) -> tuple[set[Any], set[Any], bool]:
    """The switches in the forward passes of a run, after its backward passes, and cuDNN's."""
    before = switches()
    torch.manual_seed(0)
    model = Watching(1, 1)
    model.seen = []
    after: list[Any] = []
    hook = register_optimizer_step_pre_hook(
        lambda *_: after.append((switches(), BACKENDS.cudnn.benchmark))
    )
    try:
        hs.fit(
            model,
            Blobs(8),
            output=folder / precision,
            batch_size=4,
            device="cpu",
            epochs=1,
            precision=precision,
            grid={"depth": 2},
        )
    finally:
        hook.remove()
    assert switches() == before
    return {*model.seen}, {one for one, _ in after}, all(tries for _, tries in after)


def test_all_ranks_compute_in_the_precision_of_the_recipe(tmp_path: Path) -> None:
    assert run_ranks(2, seen_in_run, tmp_path, "tf32") == [({TF32}, {TF32}, True)] * 2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_peak_is_of_the_precision(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[Any] = set()
    own = torch.mm

    def watched(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        seen.add((a.dtype, switches()))
        return own(a, b, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    monkeypatch.setattr("hyperslab.train.flops.PEAK_EXTENTS", (16, 16))
    assert measure_peak(torch.device("cpu"), precision) > 0
    wanted = TF32 if precision == "tf32" else EXACT
    assert seen == {(PRECISIONS[precision] or torch.float32, wanted)}


class Voxels(nn.Module):
    """A number for each voxel."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv3d(1, 8, 3, padding=1)
        self.b = nn.Conv3d(8, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.leaky_relu(self.a(x)))


def scaled(
    model: nn.Module, scaler: Any, x: torch.Tensor, y: torch.Tensor
) -> tuple[bool, torch.Tensor]:
    """Whether a float16 step is taken, and its gradient without the scale."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    taken: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: taken.append(None))
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return bool(taken), torch.cat([p.grad.flatten() for p in model.parameters()])


def range_of_float16(kind: type[nn.Module], extents: dict[str, int]) -> list[tuple[bool, bool]]:
    """Whether serial torch takes a step and whether this grid does, by the scale."""
    grid = hs.Grid(**extents)
    torch.manual_seed(0)
    serial = kind(1, 3) if kind is Net else kind()
    x = torch.randn(2, 1, 8, 9, 8)
    y = torch.randn_like(serial(x))
    cut = hs.parallelize(copy.deepcopy(serial), grid)
    found = []
    for scale in [2.0**k for k in range(0, 25, 2)]:
        for model in (serial, cut):
            model.zero_grad()
        alone, expected = scaled(serial, torch.amp.GradScaler("cpu", init_scale=scale), x, y)
        with mock.patch.object(LossScaler, "FIRST", scale):
            ours = LossScaler(grid, "float16")
        together, got = scaled(cut, ours, hs.shard(x, grid), hs.shard(y, grid))
        if alone and together and scale >= 16:
            assert torch.linalg.norm(got - expected) <= 2e-3 * torch.linalg.norm(expected)
        found.append((alone, together))
    return found


@pytest.mark.parametrize(
    ("extents", "kind"),
    by_rotation([{"depth": 2}, {"data": 2}, {"depth": 2, "height": 2}], [Net, Voxels]),
    ids=str,
)
def test_float16_ends_on_a_grid_where_it_does_on_one_rank(
    kind: type[nn.Module], extents: dict[str, int]
) -> None:
    size = 2 ** len(extents)
    first, *others = run_ranks(size, range_of_float16, kind, extents)
    assert others == [first] * (size - 1)
    assert any(alone for alone, _ in first)
    assert not all(alone for alone, _ in first)
    assert all(together for alone, together in first if alone)


def trained_in_float16(folder: Path, extents: dict[str, int], resume: bool) -> list[torch.Tensor]:
    """The gradients of the steps of a run that the optimizer got."""
    torch.manual_seed(0)
    found: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found.append(torch.cat([p.grad.flatten() for p in parameters]))

    hook = register_optimizer_step_pre_hook(keep)
    gentle = mock.patch.object(LossScaler, "FIRST", 256.0)  # no step is skipped
    try:
        with gentle:
            hs.fit(
                Net(1, 1),
                Blobs(8),
                output=folder,
                batch_size=4,
                device="cpu",
                epochs=2 if resume else 1,
                precision="float16",
                optimizer={"clip": 1e6},  # looks at gradients: they must be without the scale
                grid=extents,
                resume=resume,
            )
    finally:
        hook.remove()
    return found


def test_a_run_in_float16_is_one_run_on_all_grids(tmp_path: Path) -> None:
    (alone,) = run_ranks(1, trained_in_float16, tmp_path / "1", {}, False)
    one, two = run_ranks(2, trained_in_float16, tmp_path / "2", {"depth": 2}, False)
    for grid in (one, two):
        for got, expected in zip(grid, alone, strict=True):
            assert torch.linalg.norm(got - expected) <= 5e-3 * torch.linalg.norm(expected)
    for run in ("1", "2"):
        path = latest(tmp_path / run)
        assert path is not None
        assert read_extra_values(path, verify_checksums(path))["scaler"]["scale"] == 256.0
    (more,) = run_ranks(1, trained_in_float16, tmp_path / "2", {}, True)
    assert len(more) == len(alone)


def test_a_scale_moves_between_grids() -> None:
    class Ranks:
        device = torch.device("cpu")

        def __init__(self, size: int) -> None:
            self.size = size

    eight: Any = Ranks(8)
    four: Any = Ranks(4)
    scaler = LossScaler(eight, "float16")
    state = {**scaler.state_dict(), "scale": 1024.0, "_growth_tracker": 7}
    other = LossScaler(four, "float16")
    other.load_state_dict(state)
    assert other.get_scale() == 256.0
    assert other.state_dict() == state
    off = LossScaler(four, "bf16")
    assert off.state_dict() == {}
    off.load_state_dict(state)
    other.load_state_dict({})
    assert other.state_dict() == state
