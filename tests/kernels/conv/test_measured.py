"""Choices by measurement, and their files (tier: no process, but for the race of two)."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hyperslab.kernels.conv.autotune import (
    AutotuneCache,
    Autotuner,
    autotuner,
    fastest_variant,
    is_autotuned,
    legal_variants,
)
from hyperslab.kernels.conv.passes import conv_backward, conv_forward
from hyperslab.kernels.conv.problem import ConvOptions, problem_for
from hyperslab.kernels.conv.variants import variant_by_rule
from hyperslab.kernels.registry import choose_as_if_on

OPTIONS = ConvOptions((1, 1, 1), (1, 1, 1), 1)
LARGE = problem_for(
    "forward", (1, 16, 32, 32, 32), (16, 16, 3, 3, 3), torch.float32, OPTIONS, (1, 1, 1)
)
SMALL = problem_for("forward", (1, 2, 8, 8, 8), (2, 2, 3, 3, 3), torch.float32, OPTIONS, (1, 1, 1))


def test_small_and_traced_problems_are_not_measured() -> None:
    assert is_autotuned(LARGE)
    assert not is_autotuned(SMALL)
    with choose_as_if_on("cpu"):
        assert not is_autotuned(LARGE)


def test_the_fastest_is_legal_and_a_variant_that_fails_is_none() -> None:
    def run(name: str) -> None:
        if name != variant_by_rule(LARGE):
            raise RuntimeError("could not create a primitive")

    assert fastest_variant(LARGE, run) == variant_by_rule(LARGE)
    assert legal_variants(LARGE)[0] == variant_by_rule(LARGE)
    assert len(set(legal_variants(LARGE))) == len(legal_variants(LARGE)) > 1


def test_no_large_columns_of_torch_s_are_tried() -> None:
    """Of a block of frames torch would make 27 copies; of all the frames it makes none."""
    for height, few in ((16, True), (96, False), (192, True)):
        x = (1, 16, 11, height, 192)
        problem = problem_for("forward", x, (16, 16, 3, 3, 3), torch.float32, OPTIONS, (0, 1, 1))
        columns = 4 * 27 * 16 * 9 * height * 192
        assert ("torch" in legal_variants(problem)) == few, columns >> 20


def test_a_choice_is_repeated_by_others(tmp_path: Path) -> None:
    runs: list[str] = []
    first = Autotuner(AutotuneCache(tmp_path)).name(LARGE, runs.append)
    count = len(runs)
    assert count > 1
    assert Autotuner(AutotuneCache(tmp_path)).name(LARGE, runs.append) == first
    assert len(runs) == count, "read, not measured"
    assert AutotuneCache(tmp_path, threads=7).read(LARGE) is None, "another number of threads"


def test_the_first_writer_wins(tmp_path: Path) -> None:
    one, other = AutotuneCache(tmp_path), AutotuneCache(tmp_path)
    assert one.keep(LARGE, "torch") == "torch"
    assert other.keep(LARGE, "onednn") == "torch"
    assert one.read(LARGE) == "torch"
    assert not list(tmp_path.rglob("*.partial"))


RACE = """
import sys
from pathlib import Path
from hyperslab.kernels.conv.autotune import AutotuneCache
from tests.kernels.conv.test_measured import LARGE
print(AutotuneCache(Path(sys.argv[1])).keep(LARGE, sys.argv[2]))
"""


def test_two_processes_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    running = [
        subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True)
        for name in ("torch", "onednn")
    ]
    said = {process.communicate()[0].strip() for process in running}
    assert len(said) == 1
    assert said == {AutotuneCache(tmp_path).read(LARGE)}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"problem": 1}', "\xff"])
def test_a_damaged_file_is_written_again(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    AutotuneCache(tmp_path).keep(LARGE, "torch")
    (path,) = tmp_path.rglob("*.json")
    path.write_text(text, encoding="latin-1")
    stored = AutotuneCache(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert stored.read(LARGE) is None
        assert stored.keep(LARGE, "onednn") == "onednn"
    assert len(caplog.records) == 1
    assert AutotuneCache(tmp_path).read(LARGE) == "onednn"


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    stored = AutotuneCache(file)
    with caplog.at_level(logging.WARNING):
        assert stored.read(LARGE) is None
        assert stored.keep(LARGE, "torch") == "torch"
        assert stored.keep(SMALL, "torch") == "torch"
    assert len(caplog.records) == 1


def test_both_ways_repeat_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    autotuner.cache_clear()
    torch.manual_seed(0)
    x, weight = torch.randn(LARGE.x), torch.randn(LARGE.weight)
    try:
        for kernels in ("fixed", "measure"):
            found = []
            for _ in range(2):
                autotuner.cache_clear()
                with torch.no_grad():
                    y = conv_forward(x, weight, None, OPTIONS, (1, 1, 1), kernels)
                    needs = [True, True, False]
                    grads = conv_backward(y, x, weight, OPTIONS, (1, 1, 1), needs, kernels)
                found.append((y, *grads[:2]))
            for a, b in zip(*found, strict=True):
                assert torch.equal(a, b)
    finally:
        autotuner.cache_clear()
