"""Choices by measurement, and their files (tier: no process, but for the race of two)."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hyperslab.ops.kernels.choose import as_if_on
from hyperslab.ops.kernels.convolution import ConvOptions, conv_backward, conv_forward
from hyperslab.ops.kernels.convolution.measured import (
    MeasuredChoices,
    fastest,
    is_measured,
    legal,
    measured_choices,
)
from hyperslab.ops.kernels.convolution.options import problem_for
from hyperslab.ops.kernels.convolution.stored import StoredChoices
from hyperslab.ops.kernels.convolution.variants import fixed

OPTIONS = ConvOptions((1, 1, 1), (1, 1, 1), 1)
LARGE = problem_for(
    "forward", (1, 16, 32, 32, 32), (16, 16, 3, 3, 3), torch.float32, OPTIONS, (1, 1, 1)
)
SMALL = problem_for("forward", (1, 2, 8, 8, 8), (2, 2, 3, 3, 3), torch.float32, OPTIONS, (1, 1, 1))


def test_small_and_traced_problems_are_not_measured() -> None:
    assert is_measured(LARGE)
    assert not is_measured(SMALL)
    with as_if_on("cpu"):
        assert not is_measured(LARGE)


def test_the_fastest_is_legal_and_a_variant_that_fails_is_none() -> None:
    def run(name: str) -> None:
        if name != fixed(LARGE):
            raise RuntimeError("could not create a primitive")

    assert fastest(LARGE, run) == fixed(LARGE)
    assert legal(LARGE)[0] == fixed(LARGE)
    assert len(set(legal(LARGE))) == len(legal(LARGE)) > 1


def test_no_large_columns_of_torch_s_are_tried() -> None:
    """Of a block of frames torch would make 27 copies; of all the frames it makes none."""
    for height, few in ((16, True), (96, False), (192, True)):
        x = (1, 16, 11, height, 192)
        problem = problem_for("forward", x, (16, 16, 3, 3, 3), torch.float32, OPTIONS, (0, 1, 1))
        columns = 4 * 27 * 16 * 9 * height * 192
        assert ("torch" in legal(problem)) == few, columns >> 20


def test_a_choice_is_repeated_by_others(tmp_path: Path) -> None:
    runs: list[str] = []
    first = MeasuredChoices(StoredChoices(tmp_path)).name(LARGE, runs.append)
    count = len(runs)
    assert count > 1
    assert MeasuredChoices(StoredChoices(tmp_path)).name(LARGE, runs.append) == first
    assert len(runs) == count, "read, not measured"
    assert StoredChoices(tmp_path, threads=7).read(LARGE) is None, "another number of threads"


def test_the_first_writer_wins(tmp_path: Path) -> None:
    one, other = StoredChoices(tmp_path), StoredChoices(tmp_path)
    assert one.keep(LARGE, "torch") == "torch"
    assert other.keep(LARGE, "onednn") == "torch"
    assert one.read(LARGE) == "torch"
    assert not list(tmp_path.rglob("*.partial"))


RACE = """
import sys
from pathlib import Path
from hyperslab.ops.kernels.convolution.stored import StoredChoices
from tests.ops.kernels.convolution.test_measured import LARGE
print(StoredChoices(Path(sys.argv[1])).keep(LARGE, sys.argv[2]))
"""


def test_two_processes_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    running = [
        subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True)
        for name in ("torch", "onednn")
    ]
    said = {process.communicate()[0].strip() for process in running}
    assert len(said) == 1
    assert said == {StoredChoices(tmp_path).read(LARGE)}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"problem": 1}', "\xff"])
def test_a_damaged_file_is_written_again(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    StoredChoices(tmp_path).keep(LARGE, "torch")
    (path,) = tmp_path.rglob("*.json")
    path.write_text(text, encoding="latin-1")
    stored = StoredChoices(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert stored.read(LARGE) is None
        assert stored.keep(LARGE, "onednn") == "onednn"
    assert len(caplog.records) == 1
    assert StoredChoices(tmp_path).read(LARGE) == "onednn"


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    stored = StoredChoices(file)
    with caplog.at_level(logging.WARNING):
        assert stored.read(LARGE) is None
        assert stored.keep(LARGE, "torch") == "torch"
        assert stored.keep(SMALL, "torch") == "torch"
    assert len(caplog.records) == 1


def test_both_ways_repeat_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured_choices.cache_clear()
    torch.manual_seed(0)
    x, weight = torch.randn(LARGE.x), torch.randn(LARGE.weight)
    try:
        for kernels in ("fixed", "measure"):
            found = []
            for _ in range(2):
                measured_choices.cache_clear()
                with torch.no_grad():
                    y = conv_forward(x, weight, None, OPTIONS, (1, 1, 1), kernels)
                    needs = [True, True, False]
                    grads = conv_backward(y, x, weight, OPTIONS, (1, 1, 1), needs, kernels)
                found.append((y, *grads[:2]))
            for a, b in zip(*found, strict=True):
                assert torch.equal(a, b)
    finally:
        measured_choices.cache_clear()
