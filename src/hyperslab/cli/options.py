"""Declares the options that several commands share, and reads their words: without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from hyperslab.comm.launchers import adopt_launcher
from hyperslab.util.atomic_files import check_file

if TYPE_CHECKING:
    from hyperslab.train.samples import WindowPolicy

N = TypeVar("N", int, float)

RunArgument = Annotated[Path, typer.Argument(help="The folder of a training run.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides of the recipe, such as grid.depth=2 data.batch_size=16."),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of ranks to start, as many as the grid has. Default: those, or 1."
    ),
]
CheckpointOption = Annotated[
    str,
    typer.Option(help="Checkpoint to use: best, latest, a name in the run's folder, or a path."),
]
WindowOption = Annotated[
    str | None, typer.Option(help="Predict in windows of D,H,W voxels, such as 96,96,96.")
]
OverlapOption = Annotated[
    float | None, typer.Option(help="Overlap of neighbouring windows, from 0 to 1. Default: 0.5.")
]
BlendOption = Annotated[
    Literal["gaussian", "constant"] | None,
    typer.Option(help="Weights of overlapping windows. Default: gaussian."),
]


def windows_of_options(
    window: str | None, overlap: float | None, blend: Literal["gaussian", "constant"] | None
) -> WindowPolicy | None:
    """Read the options of windows, None where they say nothing; raises BadParameter."""
    if window is None:
        if overlap is not None or blend is not None:
            raise typer.BadParameter("--overlap and --blend need windows: give --window D,H,W")
        return None
    size = three("--window", window, int)
    chosen = 0.5 if overlap is None else overlap
    if not 0 <= chosen < 1:
        raise typer.BadParameter(f"--overlap {chosen:g}: give 0 <= overlap < 1")
    from hyperslab.train.samples import WindowPolicy  # numpy

    return WindowPolicy(size, chosen, blend or "gaussian")


def numbers(text: str, kind: Callable[[str], N]) -> list[N]:
    """Read numbers with commas between; none where a word is no number."""
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        return []


def three(option: str, text: str, kind: Callable[[str], N]) -> tuple[N, N, N]:
    """Read three numbers above 0, D,H,W; one stands for all of them; raises BadParameter."""
    found = numbers(text, kind)
    if len(found) not in (1, 3) or not all(n > 0 for n in found):
        raise typer.BadParameter(f"{option} {text}: give one number or three, D,H,W, above 0")
    return found[0], found[len(found) // 2], found[-1]


_OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=")


def without_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell other arguments from overrides, which look like one and are no file."""
    overrides = [a for a in arguments if _OVERRIDE.match(a) and not Path(a).exists()]
    return [a for a in arguments if a not in overrides], overrides


MissingChunksOption = Annotated[
    bool,
    typer.Option(
        "--missing-chunks", help="Take a file's fill value for chunks that it does not store."
    ),
]
TrustOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE",
        help="Installed module whose classes the recipe in somebody else's run folder may name, "
        "such as monai.networks.nets; may be repeated. Runs that you trained here need none; a run "
        "that was continued with --trust needs it again.",
    ),
]
PartOption = Annotated[
    str | None,
    typer.Option(
        metavar="K/N",
        help="Make part K of N, counted from 0, as one task of a job array. Default: this rank's.",
    ),
]
PluginOption = Annotated[
    list[str] | None, typer.Option(help="Module to import that registers formats; may be repeated.")
]
ChannelsOption = Annotated[
    Literal["first", "last"] | None,
    typer.Option(help="Place of the channels in the folder, if the shapes do not tell."),
]
OutsideFilesOption = Annotated[
    bool,
    typer.Option("--outside-files", help="Allow HDF5 files to refer to files outside the folder."),
]
MachineOption = Annotated[
    str | None,
    typer.Option(
        help="Machine whose times are predicted: a shipped name, or a calibrated file. Default: "
        "the device's."
    ),
]


def check_machine(name: str | None) -> None:
    """Read the file of a machine that is named, so that what is wrong with it is said first.

    Raises:
        MachineError: as `load_machine`.
    """
    if name is None:
        return
    from hyperslab.planner.machine import read_machine, shipped_machines  # classes of pydantic's

    if name not in shipped_machines():
        read_machine(name)


def check_machine_file(option: str, out: Path | None) -> None:
    """Refuse a machine file as `check_file` does, or one that is there and is none.

    Raises:
        MachineError: as `load_machine`.
    """
    check_file(out, option)
    if out is not None and out.is_file():
        from hyperslab.planner.machine import read_machine

        read_machine(out)


def volume_shape(text: str) -> tuple[int, ...]:
    """Read ``--shape``; raises BadParameter."""
    shape = tuple(numbers(text, int))
    if len(shape) != 4 or min(shape) < 1:
        raise typer.BadParameter(f"--shape {text}: give C,D,H,W, such as 4,512,512,512")
    return shape


def memory_size(text: str) -> int:
    """Read ``--memory`` [B]; raises BadParameter."""
    try:
        size: int = TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text)
    except ValidationError:
        raise typer.BadParameter(f"--memory {text}: give a size, such as 16GiB") from None
    return size


def rank_counts(words: str) -> list[int]:
    """Read ``1,2,4`` of ``--ranks`` as numbers, the smallest first; raises BadParameter."""
    counts = numbers(words, int)
    if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
        raise typer.BadParameter(
            f"--ranks {words}: give different numbers from 1 on, such as 1,2,4"
        )
    return sorted(counts)


def part_of_command(text: str | None) -> tuple[int, int]:
    """Read ``--part``: this process's number and how many there are; as a rank that of the rank.

    Raises:
        BadParameter: it is no such part.
        HyperslabError: a variable of the launcher is missing or odd.
    """
    if text is None:
        place = adopt_launcher(os.environ)
        return (0, 1) if place is None else (place.rank, place.size)
    number, slash, parts = text.partition("/")
    if not (slash and number.isdecimal() and parts.isdecimal() and int(number) < int(parts)):
        raise typer.BadParameter(f"--part {text}: give K/N with K from 0 to N - 1, such as 0/16")
    return int(number), int(parts)
