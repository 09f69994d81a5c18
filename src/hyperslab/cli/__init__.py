"""Runs the command line `hyperslab COMMAND ...`, one file a command.

A command is imported when it runs: to list them all takes their names and their help lines alone.
A command imports what it works with, torch before all, once it has looked at its words, the
recipe, and the names and headers of files: what is wrong with them is said in half a second, and
not in three.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from hyperslab.cli import terminal
from hyperslab.util.optional_libraries import current_versions

COMMANDS = {
    "simulate": "Simulate N-body universes in the public HDF5 layout.",
    "inspect": "Show what a folder holds and what reading it costs.",
    "calibrate": "Measure how fast this machine is, for plans.",
    "doctor": "Look at ranks, links, files and clocks before a job.",
    "plan": "Predict the step time and memory of every grid.",
    "train": "Train a network.",
    "evaluate": "Measure a trained network on the test split.",
    "predict": "Predict whole volumes, each cut over all ranks.",
    "report": "Write a self-contained page of figures and tables.",
    "scale": "Measure or predict how training scales.",
    "sweep": "Train and compare variants of a recipe.",
    "recipes": "List the shipped recipes, or copy one.",
    "compile": "Compile the kernels for this processor.",
    "convert": "Convert a folder to another format.",
}
"""The commands, each with the first sentence of its help; it is `NAME_command` of its module."""


class Commands(TyperGroup):
    """Loads a command by its name, and lists all of them without loading any.

    Typer has an end of its own for Ctrl-C, which depends on its version.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, help_line in COMMANDS.items():
            self.add_command(TyperCommand(name, help=help_line))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.obj = [*args]  # the command line, for ranks that a command starts with the same one
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        listed = TyperGroup(
            name=self.name,
            commands=dict(self.commands),
            params=self.params,
            help=self.help,
            rich_markup_mode=self.rich_markup_mode,
        )
        listed.format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        with terminal.clean_interrupts():
            return super().invoke(ctx)


def load_command(name: str) -> Any:
    """Import a command, as the object that Typer makes of it."""
    found = getattr(import_module(f"{__name__}.{name}"), f"{name}_command")
    if isinstance(found, typer.Typer):
        group = get_group(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name)(found)
    return get_command(alone)


app = typer.Typer(
    cls=Commands,
    help="Train 3D CNNs on volumes larger than one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # markup would swallow [mm], and break lines where the source does
)


def show_version(wanted: bool) -> None:
    """Print the versions of hyperslab, torch and Python, and end."""
    if wanted:
        versions = current_versions()
        typer.echo(
            f"hyperslab {versions['hyperslab']} (torch {versions['torch']}, "
            f"Python {versions['python']})"
        )
        raise typer.Exit


@app.callback()
def before_any_command(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=show_version, is_eager=True, help="Show the versions and exit."
        ),
    ] = False,
) -> None:
    if debug:
        os.environ[terminal.DEBUG] = "1"


def main() -> None:
    """Run the command of this process: the entry point of `hyperslab` and `python -m hyperslab`."""
    terminal.begin_interrupts()
    try:
        with terminal.clean_interrupts(), terminal.clean_errors():
            app(prog_name="hyperslab")
    except BaseException as end:
        if "RANK" in os.environ:
            terminal.leave_rank(end)
        raise
