"""The one choice of implementations: its table, its force, its repetition (tier: one process)."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import hyperslab.kernels
from hyperslab.kernels import registry
from hyperslab.kernels.compile import direct_is_known, library, winograd_is_known
from hyperslab.kernels.conv import conv_backward, conv_forward
from hyperslab.kernels.conv_problem import KERNELS, ConvOptions, Kernels, Problem, Task
from hyperslab.kernels.conv_variants import CONV_VARIANTS
from hyperslab.kernels.registry import (
    OPERATORS,
    RULES,
    choose,
    conv_variant,
    force,
    onednn_supports,
    table,
)
from hyperslab.kernels.resample import Line
from hyperslab.ops.pooling import average_windows

FOLDER = Path(hyperslab.kernels.__file__).parent
PLAIN = ConvOptions((1, 1, 1), (1, 1, 1), (1, 1, 1), 1)


def problem(task: Task, channels: int, width: int, dtype: torch.dtype, samples: int = 1) -> Problem:
    x = (samples, channels, width, width, width)
    return Problem(task, x, (channels, channels, 3, 3, 3), dtype, PLAIN)


def test_the_table_names_every_implementation_and_its_file() -> None:
    rows = table()
    for task in get_args(Task):
        listed = {row[2] for row in rows if row[0] == f"conv {task}"}
        assert listed == set(CONV_VARIANTS[task]), "every implementation has a case, or goes"
    assert {row[0] for row in rows} == {*RULES, *OPERATORS}
    assert not RULES.keys() & OPERATORS.keys(), "force would not know which is meant"
    files = {file for row in rows for file in row[3].split(", ") if file}
    assert all((FOLDER / file).is_file() for file in files), files
    assert all(row[1] and row[4] for row in rows), "when, and why"


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module("hyperslab.kernels", run_name="__main__")
    said = capsys.readouterr().out
    for row in table():
        assert any(row[0] in line and row[2] in line for line in said.splitlines()), row
    for missing in registry.missing_instructions():
        assert f"Not on this machine: {missing}" in said


def test_the_rule_has_an_end() -> None:
    """The last case of an operator holds for everything."""
    for cases in RULES.values():
        assert cases[-1].words == "else"
        assert cases[-1].supports(None)
        assert cases[-1].when(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("task", get_args(Task))
def test_the_rule_takes_what_supports_the_pass(task: Task, dtype: torch.dtype) -> None:
    for channels in (1, 8, 16, 64, 256):
        for width in (2, 8, 32):
            for samples in (1, 16):
                one = problem(task, channels, width, dtype, samples)
                assert CONV_VARIANTS[task][conv_variant(one)].legal(one)


@pytest.mark.parametrize("tiles", [False, True])
def test_thresholds(tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a few voxels and many channels are one product; a large weight is contiguous."""
    monkeypatch.setattr(registry, "processor_has_matrix_tiles", lambda: tiles)
    there = onednn_supports(torch.bfloat16)

    def chosen(one: Problem) -> str:
        return choose(f"conv {one.task}", one)

    many = problem("weight", 256, 2, torch.bfloat16, 64)
    assert chosen(many) == ("im2col" if there else "widened")
    large = problem("weight", 512, 4, torch.bfloat16)
    of_large = "im2col" if tiles else "contiguous"
    assert chosen(large) == (of_large if there else "widened")
    assert chosen(problem("forward", 512, 4, torch.float32)) == "contiguous"
    assert chosen(problem("forward", 64, 16, torch.float32)) == "onednn"
    assert chosen(problem("input", 64, 16, torch.float32)) == "flipped"
    steps = ConvOptions((2, 2, 2), (1, 1, 1), (1, 1, 1), 1)
    for classes, best in ((2, "parity"), (16, "onednn")):
        x = (1, classes, 64, 64, 64)
        one = Problem("input", x, (32, classes, 3, 3, 3), torch.float32, steps)
        assert chosen(one) == best


@pytest.mark.skipif(not onednn_supports(torch.bfloat16), reason="no AVX-512 here")
def test_with_matrix_tiles_the_library_is_as_fast_as_the_kernels_for_few_channels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(tiles: bool, task: Task, channels: int, dtype: torch.dtype) -> str:
        monkeypatch.setattr(registry, "processor_has_matrix_tiles", lambda: tiles)
        return choose(f"conv {task}", problem(task, channels, 32, dtype))

    for task, channels in (("forward", 8), ("input", 16), ("weight", 8), ("weight", 32)):
        assert chosen(True, task, channels, torch.bfloat16) in ("onednn", "torch")
        assert chosen(True, task, channels, torch.float32) == (
            chosen(False, task, channels, torch.float32)
        )
    if direct_is_known():
        assert chosen(False, "forward", 8, torch.bfloat16) == "registers"
    if winograd_is_known():
        assert chosen(False, "weight", 32, torch.bfloat16) == "winograd"


def test_no_large_columns_of_torchs() -> None:
    """For a block of frames torch would make 27 copies; for all the frames it makes none."""
    for height, few in ((16, True), (96, False), (192, True)):
        x = (1, 16, 11, height, 192)
        flat = PLAIN._replace(padding=(0, 1, 1))
        one = Problem("forward", x, (16, 16, 3, 3, 3), torch.float32, flat)
        assert CONV_VARIANTS["weight"]["torch"].legal(one) == few


def test_force_refuses_what_there_is_not() -> None:
    for operator, name in (("conv weight", "fast"), ("conv", "C"), ("nothing", "C")):
        with pytest.raises(ValueError, match="has no implementation"), force({operator: name}):
            pass


def test_force_ends() -> None:
    one = problem("weight", 16, 8, torch.float32)
    before = conv_variant(one)
    with force({"conv weight": "contiguous"}):
        assert conv_variant(one) == "contiguous"
        with force({"conv forward": "contiguous"}):
            assert conv_variant(one) == "contiguous", "both"
    assert conv_variant(one) == before


@pytest.mark.skipif(library() is None, reason="no compiler: the references run")
def test_a_forced_reference_runs() -> None:
    """The marks are as long, and nothing of C is called."""
    x = torch.randn(1, 3, 4, 4, 4)
    given = (x, None, 0.0, [2, 2, 2], True, True, x.dtype)
    expected = torch.ops.hyperslab.chain_forward(*given)
    called: list[Any] = []
    operator = OPERATORS["chain_forward"]
    with force({"chain_forward": "reference"}):
        found = operator.on_cpu(*given)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hyperslab.kernels.epilogue.call", called.append)
            torch.ops.hyperslab.chain_forward(*given)
    assert not called
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kernels", KERNELS)
def test_repeats_bit_by_bit(kernels: Kernels) -> None:
    """And what measured once, and what is fixed, are the same rule."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 16, 12, 12, 12), torch.randn(16, 16, 3, 3, 3)

    def run(kernels: Kernels) -> list[torch.Tensor | None]:
        with torch.no_grad():
            y = conv_forward(x, weight, None, PLAIN, kernels)
            needs = [True, True, False]
            return [y, *conv_backward(y, x, weight, PLAIN, needs, kernels)[:2]]

    other: Kernels = "torch" if kernels == "torch" else "fixed"
    for a, b in zip(run(kernels), run(other), strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


@pytest.mark.skipif(library() is None, reason="no compiler: torch's own runs")
def test_averages_by_maps_are_the_reference() -> None:
    x = torch.randn(2, 3, 4, 6, 8)
    assert choose("avg_pool", x) == "sparse"
    expected = torch.nn.functional.avg_pool3d(x, 2)
    lines = [Line(2, 2, 0, n // 2) for n in x.shape[2:]]
    torch.testing.assert_close(average_windows(x, lines, 8), expected)
