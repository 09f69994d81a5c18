"""Runs `hyperslab convert`: copies data between formats, and from published files to one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from hyperslab.cli import options
from hyperslab.cli.rank import adopt_rank, is_started
from hyperslab.cli.terminal import counting, progress, say
from hyperslab.errors import DataError
from hyperslab.formats import registry
from hyperslab.formats.files import AccessPolicy, check_folder, walk_folder

if TYPE_CHECKING:
    from hyperslab.formats.convert import Outcome
    from hyperslab.formats.convert.scans import ScanOutcome
    from hyperslab.launch.crew import Crew

FOLDER = "folder"  # the command of `DefaultCommandGroup` that has no name


class DefaultCommandGroup(TyperGroup):
    """Has a command without a name, `hyperslab convert SRC OUT`, beside `... convert lits`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in self.commands and args[0] != FOLDER
        return super().parse_args(ctx, args if named else [FOLDER, *args])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name == FOLDER else name, command, rest


WORKERS = "Processes, each with one volume at a time. Default: one per core, up to 4."


convert_command = typer.Typer(
    cls=DefaultCommandGroup, help="Convert a folder to another format.", rich_markup_mode=None
)

CONVERT_HELP = """Convert a folder that hyperslab.open takes to another format, byte for byte.

`hyperslab convert SRC OUT --format F` copies volumes with their targets or labels and is described
here. `hyperslab convert lits [SRC] OUT --size N` reorients and resamples liver CTs, and `hyperslab
convert scans SRC OUT --spacing Z,Y,X` resamples scans to one voxel size; see their --help.

With --cut D,H,W the chunks of HDF5 and Zarr files suit a grid of depth=D height=H width=W: the box
of each rank consists of whole chunks. With --subvolumes N each volume becomes cubes of N voxels per
side, named as by the public scripts: {name}_{ix}_{iy}_{iz} along depth, height and width; for lbann
along width, height and depth; for tfrecord {folder}_{name}_{number}.

Each file is read back and its checksum compared before it gets its name; OUT/conversion.jsonl keeps
the checksums. Repeat the command to continue after an interruption: finished files of the same
source are kept. A volume that cannot be converted is named on standard error, and the exit code is
1. Under srun, jsrun and torchrun the ranks of the job share the volumes."""

LITS_HELP = """Convert liver CTs: LiTS, or the liver task of the Medical Segmentation Decathlon.

Reads volume-N.nii with segmentation-N.nii, and imagesTr/liver_N.nii with labelsTr/liver_N.nii,
each also as .nii.gz, in SRC and below. Turns each volume to the axes z, y, x (upwards, forwards, to
the right), resamples it to the size, and writes OUT/volume-N.hdf5 with HU as int16 and the labels.

A volume that is damaged, not 3-D, empty, oblique, without labels or with labels that do not fit is
skipped and named on standard error. Repeat the command to continue after an interruption: finished
files are kept. The exit code is 1 if no volume was converted."""


SCANS_HELP = """Resample scans with labels to one voxel size [mm]: networks learn in voxels.

Reads what data.path of a recipe takes: a dataset.json, a CSV list, a folder of scans. Writes
OUT/imagesTr, OUT/labelsTr and OUT/dataset.json. SimpleITK interpolates values linearly, after a
Gaussian along dims that become coarser, and takes the nearest label. Damaged scans are skipped and
named. Repeat the command to continue: existing scans are kept. `hyperslab predict` resamples its
input to the same voxel size."""


@convert_command.command(FOLDER, help=CONVERT_HELP, no_args_is_help=True)
def folder(
    src: Annotated[
        Path, typer.Argument(metavar="SRC", help="The source: a folder that hyperslab.open takes.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to fill; created if missing.")],
    format: Annotated[
        str, typer.Option(help=f"Format to write: {registry.choices(registry.names())}.")
    ] = "hdf5",
    cut: Annotated[
        str | None, typer.Option(help="Choose chunks for a grid of D,H,W parts, such as 2,2,2.")
    ] = None,
    subvolumes: Annotated[
        int | None, typer.Option(help="Cut each volume into cubes of this many voxels per side.")
    ] = None,
    redshifts: Annotated[
        str | None,
        typer.Option(help="Redshifts to copy, separated by commas: 0,0.5. Default: all."),
    ] = None,
    targets: Annotated[
        str | None, typer.Option(help="Parameters to copy, separated by commas. Default: all.")
    ] = None,
    compression: Annotated[
        str,
        typer.Option(
            help=f"Compression, if the format has it: {registry.choices(registry.compressions())}."
        ),
    ] = "none",
    workers: Annotated[int | None, typer.Option(help=WORKERS)] = None,
    source_format: Annotated[
        str | None, typer.Option(help="Format of SRC, if it holds files of several.")
    ] = None,
    channels: options.ChannelsOption = None,
    plugin: options.PluginOption = None,
    outside_files: options.OutsideFilesOption = False,
    missing_chunks: options.MissingChunksOption = False,
) -> None:
    registry.load_plugins(plugin or [])
    parts = None if cut is None else options.three("--cut", cut, int)
    wanted = None if redshifts is None else tuple(options.numbers(redshifts, float))
    if wanted == ():
        raise typer.BadParameter(f"--redshifts {redshifts}: give numbers with commas, 0,0.5")
    chosen = None if targets is None else tuple(name.strip() for name in targets.split(","))
    registry.check_written(format, compression)
    adopt_rank()
    if not is_started():
        registry.check_source(src, source_format)
    from hyperslab.formats.convert import Request, convert

    request = Request(format, parts, subvolumes, compression, wanted, chosen)

    def run(crew: Crew | None = None) -> list[Outcome]:
        with progress() as bar:

            def begun(count: int, notices: Sequence[str]) -> None:
                bar.add_task("volumes", total=count)
                for notice in notices:
                    say(f"note: {notice}", err=True)

            return convert(
                src,
                out,
                request,
                channels=channels,
                source_format=source_format,
                allowed=AccessPolicy(outside_files, missing_chunks),
                workers=_workers(workers),
                spread=None if crew is None else crew.map,
                begun=begun,
                done=lambda outcome: bar.advance(bar.task_ids[0]),
            )

    if is_started():
        from hyperslab.launch.crew import with_crew  # torch

        outcomes = with_crew(run, out)
    else:
        outcomes = run()
    if outcomes is None:
        return  # this rank is not the main one
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


@convert_command.command(help=LITS_HELP)
def lits(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="[SRC] OUT", help="Folder of the NIfTI files, and folder to fill."),
    ],
    size: Annotated[
        str, typer.Option(help="Voxels along each axis: one number, or D,H,W (z, y, x).")
    ],
    synthetic: Annotated[
        int | None,
        typer.Option(
            help="Instead of SRC, make this many phantoms in OUT/nifti, list them in "
            "OUT/dataset.json and convert them."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the phantoms.")] = 0,
    workers: Annotated[int | None, typer.Option(help=WORKERS)] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 1 if a volume with labels was skipped.")
    ] = False,
) -> None:
    shape = options.three("--size", size, int)
    *sources, out = folders
    if len(sources) != (synthetic is None):
        needed = "SRC and OUT" if synthetic is None else "OUT alone beside --synthetic"
        raise typer.BadParameter(f"got {len(folders)} folders; give {needed}")
    from hyperslab.formats.nifti.source import DATASET_JSON, find_pairs, write_dataset_json

    if synthetic is None:
        pairs = find_pairs(sources[0])
    else:
        from hyperslab.formats.targets import LIVER
        from hyperslab.simulate.phantoms import make_phantoms

        slices, width = shape[0], max(shape[1:])
        with counting("phantoms", synthetic) as done:
            pairs = make_phantoms(
                out / "nifti", synthetic, slices=slices, width=width, seed=seed, done=done
            )
        write_dataset_json(out / DATASET_JSON, pairs, LIVER, ("CT",))
    from hyperslab.formats.convert.scans import convert_scans

    with counting("volumes", len(pairs)) as done:
        outcomes = convert_scans(pairs, out, shape=shape, workers=_workers(workers), done=done)
    _report(outcomes, out)
    failed = [o for o in outcomes if o.state == "skipped" and not o.pair.test]
    if (strict and failed) or all(outcome.state == "skipped" for outcome in outcomes):
        raise typer.Exit(1)


@convert_command.command("scans", help=SCANS_HELP)
def respaced(
    src: Annotated[
        Path, typer.Argument(metavar="SRC", help="A folder of scans, or a list of them.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to fill; created if missing.")],
    spacing: Annotated[
        str, typer.Option(help="Voxel size along z, y, x [mm], such as 2.5,0.8,0.8.")
    ],
    outside_files: Annotated[
        bool,
        typer.Option("--outside-files", help="Allow the list to name files outside its folder."),
    ] = False,
) -> None:
    sizes = options.three("--spacing", spacing, float)
    if not src.is_file():
        check_folder(src)
        if not any(name.endswith((".nii", ".nii.gz", ".json")) for name in walk_folder(src)):
            raise DataError(f"{src}: no scan *.nii, *.nii.gz in it or below")
    from hyperslab.formats.convert.scans import respace_scans

    allowed = AccessPolicy(outside_files)
    with counting("scans", None) as done:
        outcomes = respace_scans(src, out, sizes, allowed=allowed, done=done)
    _report(outcomes, out)
    if all(outcome.state == "skipped" for outcome in outcomes):
        raise typer.Exit(1)


def _workers(workers: int | None) -> int:
    return min(4, os.cpu_count() or 1) if workers is None else workers


def _report(outcomes: list[ScanOutcome], out: Path) -> None:
    for outcome in sorted((o for o in outcomes if o.reason), key=lambda o: o.pair.name):
        say(f"skipped {outcome.pair.name}: {outcome.reason}", err=True)
    count = Counter(outcome.state for outcome in outcomes)
    say(
        f"{count['converted'] + count['kept']} volumes in {out} "
        f"({count['converted']} converted, {count['kept']} kept), {count['skipped']} skipped"
    )
