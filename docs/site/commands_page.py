"""The command line's reference, from typer itself."""

from __future__ import annotations

import html
import re

import typer
from typer.cli import get_docs_for_click

from hyperslab.cli import app

BEGIN = """# Command line

Every command and every option, as `hyperslab COMMAND --help` has them; this page is written from
the same declarations. `key=value` changes a key of the recipe; [Recipes](recipe.md) has them all.
"""
SHORTENED = re.compile(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n")
"""Typer cuts these lines off after some words; the page has headings."""


def commands_page() -> str:
    """Markdown with a heading for each command."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="hyperslab", indent=1)
    return f"{BEGIN}\n{SHORTENED.sub('', html.unescape(text)).rstrip()}\n"
