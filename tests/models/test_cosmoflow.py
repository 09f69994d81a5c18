"""CosmoFlow against the published numbers (tier: no process).

Shapes and flops come from meta tensors, so that width 512 costs nothing.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hyperslab.models import CosmoFlow

GIGA = 1e9


def meta(width: int, **options: object) -> CosmoFlow:
    with torch.device("meta"):
        return CosmoFlow(width, **options)  # type: ignore[arg-type]


def volume(width: int, channels: int = 4, batch: int = 1) -> torch.Tensor:
    return torch.empty(batch, channels, *[width] * 3, device="meta")


def weights(model: nn.Module) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if name.endswith("weight"))


def convolution_gflop(model: nn.Module, x: torch.Tensor) -> list[float]:
    counter = FlopCounterMode(display=False)
    with counter:
        model(x)
    table = counter.get_flop_counts()
    return [
        sum(flops.values()) / GIGA
        for name, flops in table.items()
        if name.split(".")[-1][:4] == "conv"
    ]


@pytest.mark.parametrize(("width", "total"), [(128, 18.52), (256, 147.9), (512, 1183)])
def test_paper2020_does_the_work_of_table_1(width: int, total: float) -> None:
    assert sum(convolution_gflop(meta(width), volume(width))) == pytest.approx(total, rel=5e-3)


def test_paper2020_does_the_work_of_table_1_layer_by_layer() -> None:
    layers = convolution_gflop(meta(128), volume(128))
    assert layers == pytest.approx([7.248, 7.248, 3.624, 0.2265, 0.1132, 0.0283, 0.0283], rel=2e-3)


@pytest.mark.parametrize("width", [16, 32, 64, 128, 256, 512])
def test_paper2020_has_one_last_map_and_one_size(width: int) -> None:
    model = meta(width)
    assert model.features(volume(width)).shape == (1, 256, 2, 2, 2)
    assert model(volume(width, batch=3)).shape == (3, 4)
    assert weights(model.features) == 4_715_712
    assert weights(model) == 9_435_328


def test_paper2020_is_what_the_paper_says() -> None:
    model = meta(512, batch_norm=True)
    kinds = [type(m) for m in model.features]
    assert kinds.count(nn.BatchNorm3d) == kinds.count(nn.Conv3d) == kinds.count(nn.AvgPool3d) == 7
    assert all(m.bias is None for m in model.features if isinstance(m, nn.Conv3d))
    slopes = {m.negative_slope for m in model.modules() if isinstance(m, nn.LeakyReLU)}
    assert slopes == {0.01}
    drops = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert drops == pytest.approx([0.2, 0.2])


def test_sc18_has_the_published_size_and_work() -> None:
    """28.15 MB of parameters, 69.33 Gflop a step, table I by layer [ms x Tflop/s]."""
    model = meta(128, variant="sc18")
    assert weights(model) * 4 / 1e6 == pytest.approx(28.15, abs=0.01)
    forward = convolution_gflop(model, volume(128, channels=1))
    assert forward == pytest.approx([1.72, 14.2, 5.16, 0.096, 0.113, 0.028, 0.0084], rel=0.02)
    # As published the gradient of the data is counted over the extent of the input.
    data = sum(
        2 * math.prod(layer.weight.shape) * extent**3 / GIGA
        for layer, extent in zip(
            [m for m in model.features if isinstance(m, nn.Conv3d)],
            [128, 63, 30, 13, 6, 4, 3],
            strict=True,
        )
    )
    dense = 3 * 2 * weights(model.head) / GIGA
    assert 2 * sum(forward) + data + dense == pytest.approx(69.33, rel=1e-3)


@pytest.mark.parametrize(
    ("variant", "width", "features"),
    [
        ("sc18", 128, (256, 2, 2, 2)),
        ("sc18", 64, (256, 2, 2, 2)),
        ("sc18", 32, (256, 2, 2, 2)),
        ("lbann", 32, (64, 4, 4, 4)),
        ("lbann", 128, (256, 4, 4, 4)),
        ("lbann", 512, (256, 4, 4, 4)),
        ("mlperf", 128, (512, 4, 4, 4)),
        ("mlperf", 32, (512, 1, 1, 1)),
    ],
)
def test_last_map_of_the_other_variants(
    variant: str, width: int, features: tuple[int, ...]
) -> None:
    model = meta(width, variant=variant, in_channels=2, outputs=5)
    assert model.features(volume(width, channels=2)).shape == (1, *features)
    assert model(volume(width, channels=2, batch=2)).shape == (2, 5)


@pytest.mark.parametrize(
    ("variant", "batch_norm", "bias"),
    [
        ("paper2020", False, False),
        ("sc18", False, True),
        ("lbann", False, True),
        ("lbann", True, False),
        ("mlperf", False, True),
    ],
)
def test_bias_of_the_convolutions(variant: str, batch_norm: bool, bias: bool) -> None:
    model = meta(128, variant=variant, batch_norm=batch_norm)
    found = {m.bias is not None for m in model.features if isinstance(m, nn.Conv3d)}
    assert found == {bias}


@pytest.mark.parametrize("variant", ["lbann", "mlperf"])
def test_bounded_outputs_reach_but_do_not_pass_1_2(variant: str) -> None:
    model = CosmoFlow(32, variant=variant).eval()
    nn.init.normal_(model.head.fc3.weight, std=100.0)
    y = model(torch.randn(4, 4, 32, 32, 32)).abs()
    assert 1.0 < y.max() < 1.2001


def test_paper2020_is_not_bounded() -> None:
    model = CosmoFlow(16).eval()
    nn.init.normal_(model.head.fc3.weight, std=100.0)
    assert model(torch.randn(4, 4, 16, 16, 16)).abs().max() > 2


def test_lbann_starts_at_zero_and_moves_its_last_layer_first() -> None:
    model = CosmoFlow(16, variant="lbann").eval()
    y = model(torch.randn(2, 4, 16, 16, 16))
    assert torch.equal(y, torch.zeros(2, 4))
    (y - 1).square().sum().backward()
    assert model.head.fc3.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("variant", "gain"),
    [("paper2020", 2 / (1 + 0.01**2)), ("lbann", 2.0)],
)
def test_he_normal(variant: str, gain: float) -> None:
    weight = CosmoFlow(32, variant=variant).head.fc2.weight
    assert weight.var().item() == pytest.approx(gain / weight.shape[1], rel=0.02)


@pytest.mark.parametrize("variant", ["sc18", "mlperf"])
def test_xavier_uniform(variant: str) -> None:
    weight = CosmoFlow(128, variant=variant).features.conv5.weight
    fans = math.prod(weight.shape[2:]) * (weight.shape[0] + weight.shape[1])
    assert weight.abs().max().item() == pytest.approx(math.sqrt(6 / fans), rel=0.01)


def test_it_learns_two_volumes_by_heart() -> None:
    model = CosmoFlow(16, dropout=0.0)
    x, y = torch.randn(2, 4, 16, 16, 16), torch.tensor([[0.5] * 4, [-0.5] * 4])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(30):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.025:
            break
    assert loss < 0.025


@pytest.mark.parametrize(
    ("variant", "width", "message"),
    [
        ("paper2021", 128, "no variant 'paper2021': use one of paper2020, sc18, lbann, mlperf"),
        ("paper2020", 100, "'paper2020' takes no width 100: use one of 16, 32, 64, 128, 256, 512"),
        ("paper2020", 8, "takes no width 8"),
        ("sc18", 16, "'sc18' takes no width 16: use one of 128, 64, 32"),
        ("mlperf", 16, "'mlperf' takes no width 16: use one of 32"),
    ],
)
def test_what_is_not_allowed(variant: str, width: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CosmoFlow(width, variant=variant)
