"""All variants of all passes equal the reference (tier: no process)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hyperslab.kernels import conv_variants as matrix
from hyperslab.kernels.conv import dispatch
from hyperslab.kernels.conv_problem import ConvOptions, Problem, in_channels_last, problem_for
from hyperslab.kernels.conv_variants import CONV_VARIANTS
from hyperslab.kernels.registry import conv_variant, force
from tests.kernels.conv.reference import conv_reference


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Kernels larger than the volume, windows of nothing but padding, rows that none reaches."""
    n = draw(st.sampled_from([2, 3]))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(n))

    kernel = each(1, 4)
    stride = draw(st.sampled_from([(1,) * n, kernel, each(1, 3)]))
    dilation = draw(st.sampled_from([(1,) * n, each(1, 2)]))
    padding = draw(st.sampled_from([(0,) * n, each(0, 2)]))
    least = [
        max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    extents = [draw(st.integers(low, low + 5)) for low in least]
    groups = draw(st.sampled_from([1, 1, 2]))
    inner, outer = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 3, 4]))
    return problem_for(
        "forward",
        (draw(st.sampled_from([1, 1, 2])), groups * inner, *extents),
        (groups * outer, inner, *kernel),
        torch.float32,
        ConvOptions(stride, padding, dilation, groups),
    )


VOXEL = ConvOptions(stride=(1,) * 3, padding=(0,) * 3, dilation=(1,) * 3, groups=1)
WINDOWS_OF_ONE_VOXEL = problem_for(
    "forward", (2, 4, 3, 2, 3), (3, 4, 1, 1, 1), torch.float32, VOXEL
)
STEPS_OF_TWO = problem_for(
    "forward",
    (2, 3, 8, 5, 6),
    (4, 3, 3, 3, 3),
    torch.float32,
    ConvOptions(stride=(2,) * 3, padding=(1, 0, 2), dilation=(1,) * 3, groups=1),
)


@settings(deadline=None, max_examples=60, derandomize=True)
@example(WINDOWS_OF_ONE_VOXEL, False)
@example(STEPS_OF_TWO, True)
@given(problems(), st.booleans())
def test_every_variant_equals_the_reference(problem: Problem, filters_last: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(problem.x, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(problem.weight, dtype=torch.float64, requires_grad=True)
    y = conv_reference(x, weight, None, problem.options)
    assert y.shape == problem.y
    g = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, weight), g)
    db = g.sum([0, *range(2, g.dim())])
    filters = weight.detach().float()
    filters = in_channels_last(filters) if filters_last else filters
    narrow = in_channels_last(x.detach().float()), filters
    wide = in_channels_last(g.float())
    check(problem, y, narrow[0], narrow[1], None)
    check(problem.of("input"), dx, wide, narrow[1], None)
    check(problem.of("weight"), (dw, db), narrow[0], wide, narrow[1], True)


def check(problem: Problem, expected: object, *operands: object) -> None:
    variants = CONV_VARIANTS[problem.task]
    assert variants[conv_variant(problem)].legal(problem)
    for name, variant in variants.items():
        if not variant.legal(problem):
            continue

        with force({f"conv {problem.task}": name}):
            assert conv_variant(problem) == name
            found = dispatch(problem, *operands)
        pairs = (
            zip(found, expected, strict=True) if problem.task == "weight" else [(found, expected)]
        )
        for got, want in pairs:
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4, msg=f"{name}")


@settings(deadline=None, max_examples=100, derandomize=True)
@example(STEPS_OF_TWO, 1, False)
@given(problems(), st.integers(1, 3), st.booleans())
def test_passes_in_bfloat16_equal_the_reference(
    problem: Problem, planes: int, filters_last: bool
) -> None:
    """Where oneDNN's own kernels have guards; in float32 by slabs of so many planes."""
    problem = replace(problem, dtype=torch.bfloat16)
    torch.manual_seed(0)
    x = torch.randn(problem.x).bfloat16().double().requires_grad_()
    weight = torch.randn(problem.weight).bfloat16().double().requires_grad_()
    y = conv_reference(x, weight, None, problem.options)
    g = torch.randn_like(y).bfloat16()
    dx, dw = torch.autograd.grad(y, (x, weight), g.double())
    filters = weight.detach().bfloat16()
    filters = in_channels_last(filters) if filters_last else filters
    narrow = in_channels_last(x.detach().bfloat16()), filters
    wide = in_channels_last(g)
    bias = torch.randn(problem.x[1]).bfloat16()  # of a transposed convolution
    added = bias.double().view(-1, *[1] * (x.dim() - 2))
    operands = {
        "forward": (y, (*narrow, None)),
        "input": (dx + added, (wide, narrow[1], bias)),
        "weight": (dw, (narrow[0], wide, narrow[1], True)),
    }
    nbytes = 4 * (x.numel() + y.numel())
    most = nbytes * planes // max(x.shape[2], y.shape[2])
    for (task, (expected, given_)), name in itertools.product(
        operands.items(), ("registers", "widened", "parity")
    ):
        one = problem.of(task)  # type: ignore[arg-type]
        variant = CONV_VARIANTS[one.task].get(name)
        if variant is None or not variant.legal(one):
            continue
        with (
            mock.patch.object(matrix, "WIDENED_BYTES", most),
            force({f"conv {task}": name}),
        ):
            found = dispatch(one, *given_)
        if task == "weight":
            found, db = found
            sums = g.double().sum([0, *range(2, g.dim())])
            torch.testing.assert_close(db.double(), sums, rtol=0.02, atol=0.05)
            assert found.dtype == db.dtype == torch.bfloat16
        atol = 1e-2 if name == "widened" else 0.1
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=atol, msg=task)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_windows_of_some_samples_at_a_time(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    torch.manual_seed(0)
    options = ConvOptions((2, 1, 1), (1, 0, 2), (1, 2, 1), 1)
    problem = problem_for("weight", (5, 3, 6, 7, 4), (4, 3, 3, 2, 3), torch.float32, options)
    of_a_sample = 4 * 3 * 18 * torch.Size(problem.y[2:]).numel()
    monkeypatch.setattr(matrix, "MOST_WINDOWS", of_a_sample * (at_once + 1) - 1)
    x = torch.randn(problem.x, dtype=torch.float64)
    weight = torch.randn(problem.weight, dtype=torch.float64, requires_grad=True)
    y = conv_reference(x, weight, None, options)
    g = torch.randn_like(y)
    (dw,) = torch.autograd.grad(y, weight, g)
    variant = CONV_VARIANTS["weight"]["im2col"]
    assert variant.legal(problem)
    blocks = in_channels_last(x.float()), in_channels_last(g.float()), weight.detach().float()
    found, db = variant.run(*blocks, True, problem)
    torch.testing.assert_close(found.double(), dw, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(db.double(), g.sum([0, 2, 3, 4]), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(matrix, "MOST_WINDOWS", of_a_sample - 1)
    assert not variant.legal(problem)
