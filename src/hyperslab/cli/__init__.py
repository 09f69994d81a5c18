"""The command line: `hyperslab COMMAND ...`, one file per command."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from hyperslab.cli.convert import convert
from hyperslab.cli.errors import DEBUG, clean_errors, leave
from hyperslab.cli.evaluate import evaluate
from hyperslab.cli.inspect import inspect
from hyperslab.cli.predict import predict
from hyperslab.cli.report import report
from hyperslab.cli.simulate import simulate
from hyperslab.cli.train import train

app = typer.Typer(
    help="Train 3D CNNs on volumes larger than one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


for command in (simulate, inspect, train, evaluate, predict, report):
    app.command()(command)
app.add_typer(convert, name="convert")


def main() -> None:
    """The entry point of `hyperslab` and of `python -m hyperslab`."""
    try:
        with clean_errors():
            app(prog_name="hyperslab")
    except BaseException as end:
        if "RANK" in os.environ:
            leave(end)
        raise
