"""Convert a folder to another format: what is missing is made, the rest is kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from hyperslab.atomic_files import make_scratch, remove_scratch
from hyperslab.comm import Grid
from hyperslab.convert.journal import Manifest, held
from hyperslab.convert.plan import SCRATCH, Plan
from hyperslab.convert.request import Outcome, Request
from hyperslab.convert.shards import Shards
from hyperslab.convert.worker import Done, run
from hyperslab.errors import DataError
from hyperslab.formats.registry import source_of
from hyperslab.formats.shared.channels import Channels
from hyperslab.formats.shared.reach import STRICT, Allowed
from hyperslab.worker_pool import each


def convert(
    root: Path,
    out: Path,
    request: Request,
    *,
    channels: Channels | None = None,
    source_format: str | None = None,
    allowed: Allowed = STRICT,
    workers: int = 1,
    begun: Callable[[int, Sequence[str]], None] = lambda count, notices: None,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Convert each volume of the folder ``root``, as `hyperslab.open` takes it, into ``out``.

    A volume that cannot be read is left out, and the others go on. Samples that are there already
    are kept, if they are of the same source. ``allowed``: what files may do. ``begun`` is told how
    many volumes there are and what a user should know; ``done`` of each outcome, when it is known.
    A worker holds a few slabs of a volume; of a gzipped TFRecord, all of it.

    Raises:
        DataError: ``root`` cannot be read, or the format cannot hold what is in it; ``out`` is in
            ``root``, is another conversion's or holds files that are not as they were written; it
            cannot be written. What is finished stays.
        LayoutError: the extents are no multiple of the sub-volumes' width, or less than the cut.
        HyperslabError: a worker died, or an extra is not installed.
    """
    if workers < 1:
        raise DataError(f"{workers} workers: need at least 1")
    _check_apart(root, out)
    bad: list[DataError] = []
    source = source_of(root, Grid(), channels, source_format, bad.append, allowed=allowed)
    plan = Plan(root, source, request)
    with held(out, plan.asked(), plan.recorded()) as manifest:
        begun(len(source.names) + len(bad), plan.notices())
        outcomes = [Outcome("failed", str(error)) for error in bad]
        for outcome in outcomes:
            done(outcome)
        with closing(_outcomes(plan, manifest, workers)) as others:
            for outcome in others:
                outcomes.append(outcome)
                done(outcome)
    return outcomes


def _outcomes(plan: Plan, manifest: Manifest, workers: int) -> Generator[Outcome, None, None]:
    outcomes, jobs, finished = plan.jobs(manifest)
    yield from outcomes
    scratch = manifest.folder / SCRATCH
    try:
        with _writing(manifest.folder):
            make_scratch(scratch)  # of a run that was killed nothing stays
            names = plan.samples.parameters.names
            plan.request.writer.begin(manifest.folder, names, finished)
            shards = _shards(plan, manifest)
        with closing(each(run, [(job,) for job in jobs], workers)) as results:
            for result in results:
                with _writing(manifest.folder):
                    _finish(plan, manifest, result, shards)
                if result.reason:
                    yield Outcome("failed", result.reason)
                else:
                    yield Outcome("converted" if result.job.todo else "kept")
    finally:
        remove_scratch(scratch)


def _shards(plan: Plan, manifest: Manifest) -> Shards | None:
    """The files that samples share, in formats where they do."""
    writer = plan.request.writer
    if writer.per_file == 1:
        return None
    entries = manifest.entries.values()
    return Shards(manifest.folder, entries, writer.per_file, writer.suffix)


def _finish(plan: Plan, manifest: Manifest, result: Done, shards: Shards | None) -> None:
    """Note samples, then give their files their names; or put them into shared files first."""
    made = {name for _, name in result.job.todo}
    new = [entry for entry in result.entries if entry["name"] in made]
    if shards is not None:
        for entry in new:
            (file,) = entry.pop("files")
            entry["shard"] = list(shards.append(result.job.scratch / file))
            entry["sums"] = {entry["shard"][0]: entry["sums"][file]}
            entry["files"] = {}
    manifest.add(result.entries)
    plan.request.writer.finish(manifest.folder, new)
    for entry in new:
        for file in entry["files"]:
            path = manifest.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(result.job.scratch / file, path)
    shutil.rmtree(result.job.scratch, ignore_errors=True)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Errors of the system name the folder."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be written: {error.strerror}; finished files are kept, run it again "
            "to go on"
        ) from error


def _check_apart(root: Path, out: Path) -> None:
    """One in the other would be read as part of it, the next time."""
    one = root.resolve()
    other = out.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise DataError(f"{root} and {out}: lie in each other; convert into a folder beside")
