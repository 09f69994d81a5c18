"""Runs `hyperslab recipes`: lists the recipes that come along, or copies one."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from hyperslab.cli.terminal import say
from hyperslab.recipe.shipped import copy_recipe, shipped_recipes

LONGEST_LINE = 500  # [letters] where it is no terminal that shows it
LEAST_WORDS = 20  # [letters] of what is said of a recipe, on a narrow terminal, too

recipes_command = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@recipes_command.callback()
def list_recipes(context: typer.Context) -> None:
    """List the shipped recipes, or copy one."""
    if context.invoked_subcommand is not None:
        return
    known = shipped_recipes()
    width = max(map(len, known))
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else LONGEST_LINE
    words = max(LEAST_WORDS, room - width - 2)
    for name, about in known.items():
        say(f"{name:{width}}  {textwrap.shorten(about, words, placeholder=' ...')}")
    say("\nhyperslab recipes copy NAME copies one into this folder, for you to change.")


@recipes_command.command("copy")
def copy_command(
    name: Annotated[str, typer.Argument(help="A name from the list.")],
    folder: Annotated[
        Path, typer.Argument(help="Folder to copy into; created if missing.")
    ] = Path(),
) -> None:
    """Copy a recipe; for a sweep, also copy the recipe that it varies."""
    for path in copy_recipe(name, folder):
        say(str(path))
