"""Runs `hyperslab convert`: copies data between formats, and from published files to one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hyperslab.cli.options import MissingChunksOption, PluginOption, channels_of_option
from hyperslab.cli.terminal import progress, say
from hyperslab.formats.convert import Request, convert
from hyperslab.formats.convert.scans import LatticeShape, ScanOutcome, convert_scans, respace_scans
from hyperslab.formats.files import AccessPolicy
from hyperslab.formats.nifti.lists import DATASET_JSON, Pair, find_pairs
from hyperslab.formats.registry import choices, compressions, load_plugins, names
from hyperslab.simulate.phantoms import list_phantoms, make_phantoms

FOLDER = "folder"
"""Names the command that has no name."""

WORKERS = "Processes, one volume each at a time. Default: one per core, up to 4."


class DefaultCommandGroup(TyperGroup):
    """Has a command without a name, `hyperslab convert SRC OUT`, beside `... convert lits`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in self.commands and args[0] != FOLDER
        return super().parse_args(ctx, args if named else [FOLDER, *args])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name == FOLDER else name, command, rest


convert_commands = typer.Typer(
    cls=DefaultCommandGroup, help="Convert a folder to another format, or liver CTs to HDF5."
)

CONVERT_HELP = """Convert a folder that hyperslab.open takes to another format, byte for byte.

There are two forms: `hyperslab convert SRC OUT --format F` for volumes and their targets or labels
as they are, of which the rest of this page speaks; and `hyperslab convert lits [SRC] OUT --size N`
for liver CTs from NIfTI, which are turned and resampled (see `hyperslab convert lits --help`).

With --cut D,H,W the chunks of HDF5 and Zarr files are made for a grid of depth=D height=H width=W:
the box of each rank is whole chunks. With --subvolumes N each volume becomes cubes of N voxels a
side, named as the public scripts do: {name}_{ix}_{iy}_{iz} along depth, height and width, as lbann
along width, height and depth, and as tfrecord {folder}_{name}_{number}.

Each file is read back and its checksum compared before it gets its name; OUT/conversion.jsonl keeps
the checksums. Run it again to go on after a stop: finished files of the same source are kept. A
volume that cannot be converted is named on standard error, and the exit code is then 1."""

LITS_HELP = """Convert liver CTs: LiTS, or the liver task of the Medical Segmentation Decathlon.

Reads volume-N.nii with segmentation-N.nii, and imagesTr/liver_N.nii with labelsTr/liver_N.nii,
each also as .nii.gz, in SRC and below. Turns each volume to the axes z, y, x (upwards, forwards, to
the right), resamples it to the size, and writes OUT/volume-N.hdf5 with HU as int16 and the labels.

A volume that is damaged, not 3-D, empty, oblique, without labels or with labels that do not fit is
skipped and named on standard error. Run it again to go on after a stop: finished files are kept.
Exits with 1 if there is nothing to show for it."""


SCANS_HELP = """Bring scans with labels to one size of a voxel [mm]: networks learn in voxels.

Reads what data.path of a recipe takes: a dataset.json, a CSV list, a folder of scans. Writes
OUT/imagesTr, OUT/labelsTr and OUT/dataset.json: values by SimpleITK, linear after a Gaussian along
what becomes coarser, labels the nearest. Damaged scans are skipped and named; run again, scans that
are there are kept. `hyperslab predict` brings what it predicts to the same size."""


def _wrapped(text: str) -> str:
    """Join each paragraph to one line: the terminal breaks it."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


@convert_commands.command(FOLDER, help=_wrapped(CONVERT_HELP), no_args_is_help=True)
def folder(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="A folder that hyperslab.open takes.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to fill; made if missing.")],
    format: Annotated[str, typer.Option(help=f"To: {choices(names())}.")] = "hdf5",
    cut: Annotated[
        str | None, typer.Option(help="Parts along depth, height and width: 2,2,2.")
    ] = None,
    subvolumes: Annotated[
        int | None, typer.Option(help="Cut each volume into cubes of so many voxels a side.")
    ] = None,
    redshifts: Annotated[
        str | None, typer.Option(help="Take these along, with commas: 0,0.5. Default: all.")
    ] = None,
    targets: Annotated[
        str | None, typer.Option(help="Take these parameters along, with commas. Default: all.")
    ] = None,
    compression: Annotated[
        str, typer.Option(help=f"{choices(compressions())}, as far as the format has it.")
    ] = "none",
    workers: Annotated[int | None, typer.Option(help=WORKERS)] = None,
    source_format: Annotated[
        str | None, typer.Option(help="Of SRC, where it holds several.")
    ] = None,
    channels: Annotated[
        str | None, typer.Option(help="Of SRC, first or last, where its shapes do not tell.")
    ] = None,
    plugin: PluginOption = None,
    outside_files: Annotated[
        bool,
        typer.Option(
            "--outside-files", help="HDF5 files may take values from files outside of SRC."
        ),
    ] = False,
    missing_chunks: MissingChunksOption = False,
) -> None:
    load_plugins(plugin or [])
    place = channels_of_option(channels)
    parts = None if cut is None else _three("--cut", cut)
    request = Request(
        format,
        parts,
        subvolumes,
        compression,
        None if redshifts is None else _numbers("--redshifts", redshifts),
        None if targets is None else tuple(name.strip() for name in targets.split(",")),
    )
    with progress() as bar:

        def begun(count: int, notices: Sequence[str]) -> None:
            bar.add_task("volumes", total=count)
            for notice in notices:
                say(f"note: {notice}", err=True)

        outcomes = convert(
            src,
            out,
            request,
            channels=place,
            source_format=source_format,
            allowed=AccessPolicy(outside_files, missing_chunks),
            workers=_workers(workers),
            begun=begun,
            done=lambda outcome: bar.advance(bar.task_ids[0]),
        )
    for outcome in outcomes:
        if outcome.reason:
            say(f"not converted: {outcome.reason}", err=True)
    count = Counter(outcome.state for outcome in outcomes)
    say(
        f"{count['converted'] + count['kept']} volumes in {out} as {format} "
        f"({count['converted']} converted, {count['kept']} kept), {count['failed']} not converted"
    )
    if count["failed"]:
        raise typer.Exit(1)


@convert_commands.command(help=_wrapped(LITS_HELP))
def lits(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="[SRC] OUT", help="Folder of the NIfTI files; folder to fill."),
    ],
    size: Annotated[
        str, typer.Option(help="Voxels along each axis, or three numbers D,H,W (z, y, x).")
    ],
    synthetic: Annotated[
        int | None,
        typer.Option(
            help="Take no SRC: make so many phantoms in OUT/nifti, list them in OUT/dataset.json "
            "and convert them."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Phantom N depends on this, N and the size.")] = 0,
    workers: Annotated[
        int | None,
        typer.Option(help=WORKERS),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if a volume with labels was skipped.")
    ] = False,
) -> None:
    shape = _three("--size", size)
    *sources, out = folders
    if len(sources) != (synthetic is None):
        needed = "SRC and OUT" if synthetic is None else "OUT alone beside --synthetic"
        raise typer.BadParameter(f"got {len(folders)} folders; give {needed}")
    if synthetic is None:
        pairs = find_pairs(sources[0])
    else:
        pairs = _phantoms(out / "nifti", synthetic, shape, seed)
        list_phantoms(out / DATASET_JSON, pairs)
    outcomes = _converted(pairs, out, shape, workers)
    _report(outcomes, out)
    failed = [o for o in outcomes if o.state == "skipped" and not o.pair.test]
    if (strict and failed) or all(outcome.state == "skipped" for outcome in outcomes):
        raise typer.Exit(1)


@convert_commands.command("scans", help=_wrapped(SCANS_HELP))
def respaced(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="A folder of scans, or their list.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to fill; made if missing.")],
    spacing: Annotated[str, typer.Option(help="Of voxels along z, y, x [mm]: 2.5,0.8,0.8.")],
    outside_files: Annotated[
        bool, typer.Option("--outside-files", help="The list may name files outside of its folder.")
    ] = False,
) -> None:
    sizes = _numbers("--spacing", spacing)
    if len(sizes) not in (1, 3):
        raise typer.BadParameter(f"--spacing {spacing}: give one number or three, D,H,W")
    depth, height, width = sizes * 3 if len(sizes) == 1 else sizes
    with progress() as bar:
        task = bar.add_task("scans", total=None)
        outcomes = respace_scans(
            src,
            out,
            (depth, height, width),
            allowed=AccessPolicy(outside_files),
            done=lambda outcome: bar.advance(task),
        )
    _report(outcomes, out)
    if all(outcome.state == "skipped" for outcome in outcomes):
        raise typer.Exit(1)


def _three(option: str, text: str) -> LatticeShape:
    try:
        numbers = [int(number) for number in text.split(",")]
        depth, height, width = numbers * 3 if len(numbers) == 1 else numbers
    except ValueError:
        raise typer.BadParameter(f"{option} {text}: give one number or three, D,H,W") from None
    return depth, height, width


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} {text}: give numbers with commas, 0,0.5") from None


def _workers(workers: int | None) -> int:
    return min(4, os.cpu_count() or 1) if workers is None else workers


def _phantoms(folder: Path, count: int, shape: LatticeShape, seed: int) -> list[Pair]:
    with progress() as bar:
        task = bar.add_task("phantoms", total=count)
        return make_phantoms(
            folder,
            count,
            slices=shape[0],
            width=max(shape[1:]),
            seed=seed,
            done=lambda pair: bar.advance(task),
        )


def _converted(
    pairs: list[Pair], out: Path, shape: LatticeShape, workers: int | None
) -> list[ScanOutcome]:
    with progress() as bar:
        task = bar.add_task("volumes", total=len(pairs))
        return convert_scans(
            pairs,
            out,
            shape=shape,
            workers=_workers(workers),
            done=lambda outcome: bar.advance(task),
        )


def _report(outcomes: list[ScanOutcome], out: Path) -> None:
    for outcome in sorted((o for o in outcomes if o.reason), key=lambda o: o.pair.name):
        say(f"skipped {outcome.pair.name}: {outcome.reason}", err=True)
    count = Counter(outcome.state for outcome in outcomes)
    say(
        f"{count['converted'] + count['kept']} volumes in {out} "
        f"({count['converted']} converted, {count['kept']} kept), {count['skipped']} skipped"
    )
