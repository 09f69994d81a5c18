"""Cross-entropy and NLL against labels that are cut like the volume (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {"losses": {"cross_entropy", "nll_loss"}}


def label_loss(
    x: Any, *, soft: bool, cut: str, ignored: float, weighted: bool, log: bool, **options: Any
) -> Any:
    """Against classes or probabilities that are cut alike, cut otherwise, or whole."""
    generator = torch.Generator().manual_seed(5)
    n, c, *s = x.shape
    if soft:
        target = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
    else:
        target = torch.randint(c, (n, *s), generator=generator)
        gone = torch.rand(target.shape, generator=generator) < ignored
        target[gone] = options["ignore_index"]
    if weighted:
        options["weight"] = torch.rand(c, generator=generator, dtype=torch.float64).to(x.dtype)
    if cut != "whole" and isinstance(x, hs.Sharded):
        target = hs.shard(target, x.grid, channels=soft)
        if cut == "otherwise":
            target = hs.gather(target, ["data", "height"])
    loss = F.nll_loss(x - 1, target, **options) if log else F.cross_entropy(x, target, **options)
    return loss.nan_to_num(nan=7.0)  # of the mean of nothing, which both should say is nan


@st.composite
def label_losses(draw: st.DrawFn, ranks: int) -> Example:
    """Volumes, images, sequences and vectors; one class as well."""
    n = draw(st.sampled_from([0, 1, 2, 3, 3]))
    grid = draw(grids(ranks))
    extents = [draw(st.integers(p, p + 4)) for p in parts_of(grid, n)] if n else []
    kind = draw(st.sampled_from(["classes", "classes", "probabilities", "nll"]))
    log, soft = kind == "nll", kind == "probabilities"
    options: dict[str, Any] = {
        "soft": soft,
        "log": log,
        "cut": draw(st.sampled_from(["alike", "alike", "otherwise", "whole"])),
        "weighted": draw(st.booleans()),
        "ignored": 0.0 if soft else draw(st.sampled_from([0.0, 0.3, 0.9])),
        "ignore_index": -100 if soft else draw(st.sampled_from([-100, 0, 255])),
        "reduction": draw(st.sampled_from(["none", "mean", "mean", "sum"])),
    }
    if not log:
        options["label_smoothing"] = draw(st.sampled_from([0.0, 0.2]))
    return Example(
        grid=grid,
        shape=(draw(st.integers(1, 5)), draw(st.sampled_from([3, 2, 1, 4])), *extents),
        dtype=draw(dtypes),
        channels_last=n > 1 and not log and draw(st.booleans()),  # nll_loss refuses serially
        options=options,
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_loss_against_labels(ranks: int) -> None:
    run_ranks(ranks, compare, label_loss, draw_examples(label_losses(ranks), 28))


def uneven_and_ignored() -> dict[str, Any]:
    """All that rank 1 holds is ignored; then all that anybody holds."""
    grid = hs.Grid(depth=2)
    x = torch.randn(1, 3, 5, 2, 2, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(3, (1, 5, 2, 2))
    labels[:, 3:] = -100
    found: dict[str, Any] = {}
    for name, y in {"some": labels, "all": torch.full_like(labels, -100)}.items():
        for kind, cut in {"cut": True, "serial": False}.items():
            x.grad = None
            given = hs.shard(x, grid) if cut else x
            target = hs.shard(y, grid, channels=False) if cut else y
            loss = F.cross_entropy(given, target)
            assert type(loss) is torch.Tensor
            loss.backward()
            found[f"{name} {kind}"] = (loss.detach(), x.grad)
    return found


def test_a_rank_whose_labels_are_all_ignored() -> None:
    for found in run_ranks(2, uneven_and_ignored):
        torch.testing.assert_close(found["some cut"], found["some serial"], rtol=1e-12, atol=1e-14)
        assert found["all serial"][0].isnan()
        torch.testing.assert_close(found["all cut"], found["all serial"], equal_nan=True)


def half_precision(dtype: torch.dtype) -> tuple[Any, Any]:
    """A sum that float16 cannot hold, of values that bfloat16 would not add up."""
    x = torch.zeros(1, 2, 64, 64, 32, dtype=dtype)
    labels = torch.zeros(1, 64, 64, 32, dtype=torch.int64)
    grid = hs.Grid(depth=2)
    cut = F.cross_entropy(hs.shard(x, grid), hs.shard(labels, grid, channels=False))
    return cut, F.cross_entropy(x.double(), labels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(dtype: torch.dtype) -> None:
    for found, expected in run_ranks(2, half_precision, dtype):
        assert found.dtype == dtype
        assert abs(found.double() - expected) < torch.finfo(dtype).eps


def under_autocast() -> list[tuple[Any, Any]]:
    x, grid = torch.randn(2, 3, 6, 5, 4), hs.Grid(data=2, depth=2)
    labels = torch.randint(3, (2, 6, 5, 4))
    found = []
    for reduction in ("none", "mean", "sum"):
        with torch.autocast("cpu", torch.bfloat16):
            serial = F.cross_entropy(x.bfloat16(), labels, reduction=reduction)
            cut = F.cross_entropy(
                hs.shard(x.bfloat16(), grid),
                hs.shard(labels, grid, channels=False),
                reduction=reduction,
            )
        found.append((cut.full() if isinstance(cut, hs.Sharded) else cut, serial))
    return found


def test_autocast_is_torchs() -> None:
    for found, expected in run_ranks(4, under_autocast)[0]:
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)


def whole_logits() -> tuple[Any, Any, Any, Any]:
    """Ordinary logits against cut labels: the plain average of the gradients is the serial one."""
    x = torch.randn(2, 3, 7, 4, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(3, (2, 7, 4, 4)).byte()
    loss = F.cross_entropy(x, hs.shard(labels, hs.Grid(depth=2), channels=False).long())
    (mine,) = torch.autograd.grad(loss, x)
    torch.distributed.all_reduce(mine)
    expected = F.cross_entropy(x, labels.long())
    return loss.detach(), expected.detach(), mine / 2, torch.autograd.grad(expected, x)[0]


def test_whole_logits_against_cut_labels() -> None:
    for loss, expected, mine, gradient in run_ranks(2, whole_logits):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(mine, gradient, rtol=1e-12, atol=1e-15)


def modules() -> None:
    """The modules of torch.nn go the same way; nothing is recorded without gradients."""
    grid = hs.Grid(height=2)
    x, labels = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.randint(3, (2, 5, 4))
    cut = hs.shard(x, grid)
    for module in (torch.nn.CrossEntropyLoss(torch.rand(3).double()), torch.nn.NLLLoss2d()):
        with torch.no_grad():
            loss = module(cut, hs.shard(labels, grid, channels=False))
        torch.testing.assert_close(loss, module(x, labels), rtol=1e-12, atol=0)
        assert not loss.requires_grad


@pytest.mark.filterwarnings("ignore:NLLLoss2d has been deprecated")
def test_modules() -> None:
    run_ranks(2, modules)


def out_of_range(reduction: str) -> str:
    """Rank 0 alone holds the label that is no class; every rank hears of it."""
    grid = hs.Grid(depth=2)
    labels = torch.zeros(1, 6, 2, 2, dtype=torch.int64)
    labels[0, 1, 1, 1] = 7
    x = hs.shard(torch.randn(1, 3, 6, 2, 2), grid)
    with pytest.raises(IndexError) as caught:
        F.cross_entropy(x, hs.shard(labels, grid, channels=False), reduction=reduction)
    return str(caught.value)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_label_out_of_range_is_an_error_on_all_ranks(reduction: str) -> None:
    first, second = run_ranks(2, out_of_range, reduction)
    assert "neither ignore_index (-100) nor one of the 3 classes" in first
    assert "labels 0 to 7" in first
    assert "labels 0 to 0" in second


def refused(case: str) -> None:
    grid = hs.Grid(data=2, width=2)
    x = hs.shard(torch.randn(4, 3, 6, 4, 4), grid)
    labels = torch.zeros(4, 6, 4, 4, dtype=torch.int64)
    {
        "channel dim": lambda: F.cross_entropy(x, labels.unsqueeze(1)),
        "another shape": lambda: F.nll_loss(x, labels[:, :5]),
        "probabilities": lambda: F.nll_loss(x, torch.rand(4, 3, 6, 4, 4)),
        "cut weight": lambda: F.cross_entropy(x, labels, hs.shard(torch.rand(4, 3), grid)),
        "deprecated": lambda: F.cross_entropy(x, labels, size_average=True),
    }[case]()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("channel dim", r"target.squeeze\(1\)"),
        ("another shape", r"target \(4, 5, 4, 4\) does not fit the input \(4, 3, 6, 4, 4\)"),
        ("probabilities", r"goes with classes \(N, ...\)"),
        ("cut weight", "the weight of the classes is an ordinary tensor"),
        ("deprecated", "use reduction="),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(hs.LayoutError, match=message):
        run_ranks(4, refused, case)


@pytest.mark.parametrize("reduction", ["batchmean", "average"])
def test_other_reductions_are_errors(reduction: str) -> None:
    x = hs.shard(torch.randn(2, 3, 4), hs.Grid())
    with pytest.raises(ValueError, match="not a valid value for reduction"):
        F.cross_entropy(x, torch.zeros(2, 4, dtype=torch.int64), reduction=reduction)
