"""Examples and their serial twins: what they print, and how many lines differ."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def differing_lines(one: str, other: str) -> list[str]:
    """Of two examples: lines of either that the other has not, a changed one once."""
    texts = [(EXAMPLES / f"{name}.py").read_text().splitlines() for name in (one, other)]
    matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
    found = []
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            found += max(texts[0][a:b], texts[1][c:d], key=len)
    return found


def printed(name: str, *arguments: object) -> str:
    """What an example prints, run in this process."""
    torch.manual_seed(torch.initial_seed())
    out = io.StringIO()
    words = [str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(out):
        runpy.run_path(words[0], run_name="__main__")
    return out.getvalue()


def losses(text: str) -> list[float]:
    """The numbers after ``epoch n:``."""
    return [float(number) for number in re.findall(r"epoch \d+: ([\d.e+-]+)", text)]
