"""Writes what commands print for ``--help`` into the package, where it is read without imports.

    python docs/help.py

A test compares the file with the commands.
"""

from __future__ import annotations

from typer.testing import CliRunner

from hyperslab.cli import COMMANDS, app, load_command
from hyperslab.cli.early import BEGIN, PAGES, WIDTH


def printed_pages() -> dict[str, str]:
    """What every command prints, and every command of theirs, by the words behind `hyperslab`."""
    below = {name: getattr(load_command(name), "commands", {}) for name in COMMANDS}
    names = [
        name
        for command in COMMANDS
        for name in (command, *(f"{command} {sub}" for sub in below[command]))
    ]
    found = {}
    for name in names:
        words = [*name.split(), "--help"]
        asked = [*words, "--help"]  # twice, so that the command itself answers
        done = CliRunner().invoke(app, asked, prog_name="hyperslab", terminal_width=WIDTH - 2)
        assert done.exit_code == 0, done.output
        found[" ".join(words)] = done.output
    return found


def text() -> str:
    """The pages, each below the command that prints it."""
    return "".join(f"{BEGIN}{words}\n{page}" for words, page in printed_pages().items())


if __name__ == "__main__":
    PAGES.write_text(text())
    print(f"wrote {PAGES}")
