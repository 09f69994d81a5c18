"""Runs the command line `hyperslab COMMAND ...`, one file a command.

A command is imported when it runs: to list them all takes their names and their help lines alone.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from hyperslab.cli.terminal import (
    DEBUG,
    begin_interrupts,
    clean_errors,
    clean_interrupts,
    leave_rank,
)
from hyperslab.util.optional_libraries import current_versions

COMMANDS = {
    "simulate": (
        "simulate_command",
        "Make N-body universes in the public HDF5 layout; run it again to go on after a stop.",
    ),
    "inspect": (
        "inspect_command",
        "Say what a folder or a recipe's data hold, and what reading them on a grid costs.",
    ),
    "calibrate": (
        "calibrate_command",
        "Measure this machine: operators, memory, messages, sums, reads, and what work hides.",
    ),
    "plan": (
        "plan_command",
        "Rank the grids of so many ranks by the time of a step; nothing is run.",
    ),
    "train": (
        "train_command",
        "Train a network; also under torchrun and srun, where every rank runs this command.",
    ),
    "evaluate": (
        "evaluate_command",
        "Measure a network on the test split; also under torchrun and srun, on any grid.",
    ),
    "predict": (
        "predict_command",
        "Predict whole volumes, each cut over all ranks; also under torchrun and srun.",
    ),
    "report": (
        "report_command",
        "Write the figures and tables of a run as one page that needs nothing else.",
    ),
    "scale": (
        "scale_command",
        "Measure or predict how training scales: throughput, speed-up, efficiency.",
    ),
    "sweep": (
        "sweep_command",
        "Choose a learning rate for each variant, then train it with several seeds and compare.",
    ),
    "recipes": (
        "recipes_commands",
        "List the recipes that come along, or copy one.",
    ),
    "compile": (
        "compile_command",
        "Compile the kernels for this machine's processor now; a first run would wait for it.",
    ),
    "convert": (
        "convert_commands",
        "Convert a folder to another format, or liver CTs to HDF5.",
    ),
}
"""The commands, each with what `hyperslab.cli.NAME` calls it and the first sentence of its help."""


class Commands(TyperGroup):
    """Loads a command by its name, and lists all of them without loading any.

    Typer has an end of its own for Ctrl-C, which depends on its version.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, (_, help_line) in COMMANDS.items():
            self.add_command(TyperCommand(name, help=help_line))

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
        with clean_interrupts():
            return super().invoke(ctx)


def load_command(name: str) -> Any:
    """Import a command, as the object that Typer makes of it."""
    found = getattr(import_module(f"{__name__}.{name}"), COMMANDS[name][0])
    if isinstance(found, typer.Typer):
        group = get_group(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False)
    alone.command(name)(found)
    return get_command(alone)


app = typer.Typer(
    cls=Commands,
    help="Train 3D CNNs on volumes larger than one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
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
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Say it and end."),
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


def main() -> None:
    """Run the command of this process: the entry point of `hyperslab` and `python -m hyperslab`."""
    begin_interrupts()
    try:
        with clean_interrupts(), clean_errors():
            app(prog_name="hyperslab")
    except BaseException as end:
        if "RANK" in os.environ:
            leave_rank(end)
        raise
