"""Programs that stand side by side on a page do the same (tier: two and four gloo ranks)."""

from __future__ import annotations

import ast
import logging
import os
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest import mock

import monai.networks.nets  # noqa: F401 - the ranks import it beforehand where a test does
import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.docs.blocks import DOCS, Block, blocks_of
from tests.ranks import run_ranks
from tests.selection import in_gate

PAGES = [*sorted((DOCS / "coming-from").glob("*.md")), DOCS / "video.md"]
IN_GATE = [page for page in PAGES if page.stem not in ("hydra", "optuna")]
"""The others start runs with `hs.fit` as `tests.studies.test_fit` does, from a library's loop."""


def programs(page: Path) -> list[Block]:
    return [block for block in blocks_of(page.read_text()) if block.language == "python"]


def pairs(page: Path) -> list[tuple[str, Block, Block]]:
    """The code that both begin with, the one on the left, the one on the right."""
    blocks = programs(page)
    setup = "".join(block.code for block in blocks if "setup" in block.run)
    left = [block for block in blocks if "left" in block.run]
    right = [block for block in blocks if "right" in block.run]
    return [(setup, a, b) for a, b in zip(left, right, strict=True)]


def variables_of_torchrun() -> dict[str, str]:
    """Those by which other libraries know that a launcher has started this rank."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {**place, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "a test"}


def run_program(
    code: str, folder: str, torchrun: bool
) -> tuple[np.ndarray[Any, Any], list[np.ndarray[Any, Any]]]:
    """What it calls its loss, and the network's weights."""
    names: dict[str, Any] = {"__name__": "__main__"}
    variables = variables_of_torchrun() if torchrun else {}
    with chdir(folder), mock.patch.dict(os.environ, variables):
        exec(compile(code, "page", "exec"), names)
    log = logging.getLogger("hyperslab")  # which `hs.fit` prints
    log.handlers.clear()
    log.setLevel(logging.NOTSET)
    if "Accelerator" in names:  # its state is the process's
        names["accelerator"].state._reset_state(reset_partial_state=True)
    state = names["net"].state_dict().values()
    weights = [value.detach().numpy() for value in state if isinstance(value, torch.Tensor)]
    return names["loss"].detach().numpy(), weights


@pytest.mark.parametrize("page", in_gate(PAGES, kept=IN_GATE), ids=lambda page: page.stem)
def test_both_sides_do_the_same(page: Path, tmp_path: Path) -> None:
    assert pairs(page)
    for setup, *sides in pairs(page):
        results = []
        for side in sides:
            code = f"{setup}\n{side.code}"
            ranks = int(side.run.get("ranks", 1))
            torchrun = "torchrun" in side.run
            of_ranks = run_ranks(ranks, run_program, code, str(tmp_path), torchrun)
            for loss, weights in of_ranks[1:]:
                np.testing.assert_array_equal(loss, of_ranks[0][0])
                for value, expected in zip(weights, of_ranks[0][1], strict=True):
                    np.testing.assert_array_equal(value, expected)
            results.append(of_ranks[0])
        (loss, weights), (other, others) = results
        np.testing.assert_allclose(other, loss, rtol=1e-4, atol=1e-6)
        for value, expected in zip(others, weights, strict=True):
            scale = max(np.linalg.norm(expected), 1e-3)
            assert np.linalg.norm(value - expected) / scale < 2e-4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_program_is_run_or_says_that_it_is_not(page: Path) -> None:
    kinds = {"setup", "left", "right", "not"}
    for block in programs(page):
        assert kinds & set(block.run), f"{page.name}, line {block.line}"
        ast.parse(block.code)


def test_a_side_that_differs_is_found(tmp_path: Path) -> None:
    torch_page = next(page for page in PAGES if page.stem == "torch")
    setup, left, _ = pairs(torch_page)[0]
    results = [
        run_ranks(
            1, run_program, f"{setup}\n{left.code.replace('Adam', kind)}", str(tmp_path), False
        )[0]
        for kind in ("Adam", "SGD")
    ]
    assert not np.allclose(results[0][0], results[1][0], rtol=1e-4)
    assert torch.is_grad_enabled()
