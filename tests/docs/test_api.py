"""The API pages show every public name, each with an example that holds (tier: two gloo ranks)."""

from __future__ import annotations

import doctest
import io
import logging
import re
import sys
import types
from contextlib import chdir
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

import hyperslab as hs
from hyperslab.formats.registry import _FORMATS
from hyperslab.tensor import RULES
from tests.docs.blocks import DOCS, blocks_of, directive_of
from tests.ranks import run_ranks

PAGES = sorted((DOCS / "api").glob("*.md"))
SESSIONS = [*PAGES, DOCS / "checkpoints.md", DOCS / "precision.md"]
FLAGS = doctest.ELLIPSIS | doctest.FAIL_FAST  # the ranks that go on would wait for the others


class AnyOutput(doctest.OutputChecker):
    """What other ranks than the first print is not shown."""

    def check_output(self, want: str, got: str, flags: int) -> bool:
        return True


def run_session(sessions: list[str], name: str, folder: str) -> None:
    """Run the examples one after the other.

    Raises:
        AssertionError: one does not hold; the others are not run, so that no rank waits for long.
    """
    module = types.ModuleType("session")  # known, so that classes in it can be sent to ranks
    test = doctest.DocTestParser().get_doctest("".join(sessions), vars(module), name, name, 0)
    test.globs = vars(module)  # not a copy
    checker = None if dist.get_rank() == 0 else AnyOutput()
    said = io.StringIO()
    modules = patch.dict(sys.modules, {"session": module})
    # Of commands that this rank has run before.
    silent = patch.object(logging.getLogger("hyperslab"), "handlers", [])
    with chdir(folder), modules, silent, patch.dict(RULES), patch.dict(_FORMATS):
        doctest.DocTestRunner(checker, False, FLAGS).run(test, out=said.write, clear_globs=False)
    assert not said.getvalue(), said.getvalue()


@pytest.mark.parametrize("page", SESSIONS, ids=lambda page: page.stem)
def test_the_examples_hold(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    sessions = [block.code for block in blocks_of(text) if block.language == "pycon"]
    ranks = int(directive_of(text)["ranks"])
    run_ranks(ranks, run_session, sessions, page.name, str(tmp_path))


def public_names() -> list[str]:
    """Those of the package and of the modules that it shows."""
    modules = [name for name in hs.__all__ if hasattr(getattr(hs, name), "__all__")]
    inside = [f"{name}.{part}" for name in modules for part in getattr(hs, name).__all__]
    return [name for name in hs.__all__ if name not in modules] + inside


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_has_an_example_and_a_description(name: str) -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    examples = "\n".join(
        line for block in blocks_of(text) for line in block.code.splitlines() if line[:1] in ">."
    )
    assert re.search(rf"\bhs\.{re.escape(name)}\b", examples), "no example"
    assert re.search(rf"^::: hyperslab\.([\w.]+\.)?{re.escape(name)}$", text, re.M), (
        "no description"
    )
