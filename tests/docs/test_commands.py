"""The page of commands names commands, targets and recipes that exist (tier: no process)."""

from __future__ import annotations

import re
from pathlib import Path

from hyperslab.cli import COMMANDS
from tests.docs.blocks import DOCS, blocks_of

ROOT = DOCS.parent
LINES = [
    line.removeprefix("$ ")
    for block in blocks_of((DOCS / "commands.md").read_text())
    for line in block.code.splitlines()
    if line.startswith("$ ")
]


def test_commands_exist() -> None:
    named = {word for line in LINES for word in re.findall(r"hyperslab ([a-z]+)", line)}
    assert named <= set(COMMANDS)
    assert set(COMMANDS) <= named, "a command is not shown"


def test_targets_exist() -> None:
    named = {line.split()[1] for line in LINES if line.startswith("make ")}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert len(named) > 3
    assert named <= targets


def test_recipes_exist() -> None:
    named = {Path(name) for line in LINES for name in re.findall(r"recipes/[\w/-]+\.yaml", line)}
    assert len(named) > 3
    assert [name for name in named if not (ROOT / name).is_file()] == []
