"""Runs the command line `hyperslab COMMAND ...`, one file a command."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hyperslab.cli.calibrate import calibrate_command
from hyperslab.cli.convert import convert_commands
from hyperslab.cli.evaluate import evaluate_command
from hyperslab.cli.inspect import inspect_command
from hyperslab.cli.plan import plan_command
from hyperslab.cli.predict import predict_command
from hyperslab.cli.recipes import recipes_commands
from hyperslab.cli.report import report_command
from hyperslab.cli.scale import scale_command
from hyperslab.cli.simulate import simulate_command
from hyperslab.cli.sweep import sweep_command
from hyperslab.cli.terminal import (
    DEBUG,
    begin_interrupts,
    clean_errors,
    clean_interrupts,
    leave_rank,
)
from hyperslab.cli.train import train_command
from hyperslab.planner.machine.schema import current_versions


class Commands(TyperGroup):
    """Typer has an end of its own for Ctrl-C, which depends on its version."""

    def invoke(self, ctx: Any) -> Any:
        with clean_interrupts():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    help="Train 3D CNNs on volumes larger than one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def show_version(wanted: bool) -> None:
    """Say it and end."""
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


app.add_typer(recipes_commands, name="recipes")
app.command("simulate")(simulate_command)
app.command("inspect")(inspect_command)
app.command("calibrate")(calibrate_command)
app.command("plan")(plan_command)
app.command("train")(train_command)
app.command("evaluate")(evaluate_command)
app.command("predict")(predict_command)
app.command("report")(report_command)
app.command("scale")(scale_command)
app.command("sweep")(sweep_command)
app.add_typer(convert_commands, name="convert")


def main() -> None:
    """The entry point of `hyperslab` and of `python -m hyperslab`."""
    begin_interrupts()
    try:
        with clean_interrupts(), clean_errors():
            app(prog_name="hyperslab")
    except BaseException as end:
        if "RANK" in os.environ:
            leave_rank(end)
        raise
