"""Networks of a receptive field each (tiers: no process; two gloo ranks)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import receptive_field
import torch
from receptive_field import RECEPTIVE_FIELDS, PatchNet

import hyperslab as hs
from hyperslab.studies.sweep.schema import load_sweep
from tests.ranks import run_ranks

SWEEP = Path(receptive_field.__file__).with_name("receptive_field_sweep.yaml")


def net(width: int) -> PatchNet:
    torch.manual_seed(width)
    made = PatchNet(1, 2, receptive_field=width, hidden=4).double().eval()
    torch.nn.init.normal_(made.head[-1].weight)  # else it predicts zero
    return made


@pytest.mark.parametrize("width", RECEPTIVE_FIELDS)
def test_a_feature_depends_on_as_many_voxels(width: int) -> None:
    x = torch.randn(1, 1, 48, 48, 48, dtype=torch.float64, requires_grad=True)
    features = net(width).features(x)
    features[(0, slice(None), *(extent // 2 for extent in features.shape[2:]))].sum().backward()
    assert x.grad is not None
    for dim in (2, 3, 4):
        seen = (x.grad != 0).any(dim).sum((-1, -2)).max()
        assert seen == width**2
    spacing = 48 // features.shape[2]
    assert spacing == max(1, (width - 1) // 2)  # neighbours overlap, none is left out


def test_only_patches_count_and_not_where_they_are() -> None:
    x = torch.randn(2, 1, 16, 16, 16, dtype=torch.float64)
    mixed = x.flatten(2)[..., torch.randperm(16**3)].view_as(x)
    assert torch.allclose(net(1)(mixed), net(1)(x))
    assert not torch.allclose(net(3)(mixed), net(3)(x))
    wide = torch.randn(2, 1, 32, 32, 32, dtype=torch.float64)
    assert torch.allclose(net(33)(wide.roll((16, 16, 16), (2, 3, 4))), net(33)(wide))


def predict(width: int) -> torch.Tensor:
    grid = hs.Grid(depth=2)
    x = torch.randn(2, 1, 32, 16, 16, dtype=torch.float64, generator=torch.manual_seed(1))
    return hs.parallelize(net(width), grid)(hs.shard(x, grid)).full().detach()


@pytest.mark.parametrize("width", [3, 33])
def test_cut_in_two_it_predicts_the_same(width: int) -> None:
    x = torch.randn(2, 1, 32, 16, 16, dtype=torch.float64, generator=torch.manual_seed(1))
    expected = net(width)(x)
    for found in run_ranks(2, predict, width):
        assert torch.allclose(found, expected, rtol=1e-10)


def test_another_receptive_field_is_refused() -> None:
    with pytest.raises(ValueError, match=r"receptive_field=4: use one of \(1, 3, 5, 9, 17, 33\)"):
        PatchNet(receptive_field=4)


def test_the_sweep_has_every_receptive_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SWEEP.parents[1])
    variants = load_sweep(SWEEP).variants
    assert [int(variant.name) for variant in variants] == list(RECEPTIVE_FIELDS)
    for variant in variants:
        made = variant.recipe.model.build((4, 32, 32, 32), 4, where="")
        assert [tuple(p.shape) for p in made.parameters()] == [
            tuple(p.shape) for p in PatchNet(receptive_field=int(variant.name)).parameters()
        ]


def test_the_record_has_the_weights_of_each_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"name": "1"}, {"name": "33"}]
    comparison = "hyperslab.studies.report.comparison.comparison_numbers"
    monkeypatch.setattr(comparison, lambda found: {"rows": rows, "of": found})
    monkeypatch.setattr(
        "hyperslab.studies.configurations.read_comparison", lambda paths: str(paths[0].name)
    )
    out = tmp_path / "out.json"
    words = ["receptive_field.py", str(tmp_path / "sweep"), "--json", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    receptive_field.main()
    found = json.loads(out.read_text())
    assert found["of"] == "sweep"
    for row in found["rows"]:
        parts = PatchNet(receptive_field=int(row["name"])).parameters()
        assert row["weights"] == sum(part.numel() for part in parts)
    assert {"date", "processor", "torch"} <= set(found["machine"])
    assert str(tmp_path) not in out.read_text()
