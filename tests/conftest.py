from __future__ import annotations

import gc
import importlib.util
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from hyperslab.kernels.compile import CannotCompile, ready_library
from tests.forked import command_server, forked_commands, import_commands
from tests.gpus import SAMPLES_ON, runs_samples
from tests.header_children import fork_small_children
from tests.ranks import close_pool, rest_idle_ranks, start_server

SESSIONS = 4  # at most: each has up to eight ranks of its own


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Let the whole suite run in several sessions side by side, by pytest-xdist.

    Ranks that exchange leave cores idle, and so do tests without ranks. What is named on the
    command line runs in this process, and so does everything after -n, under a debugger and where
    pytest-xdist is not.
    """
    options = config.option
    is_whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    is_session_of_many = hasattr(config, "workerinput")
    is_here = options.usepdb or options.collectonly or options.capture == "no"
    is_free = getattr(options, "numprocesses", 0) is None  # there is no such option without xdist
    if is_whole and is_free and not is_session_of_many and not is_here:
        sessions = min(len(os.sched_getaffinity(0)), SESSIONS)
        options.numprocesses = sessions if sessions > 1 else 0
        options.dist = "worksteal"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where samples of operators are to be on a GPU, nothing runs but what compares them."""
    if SAMPLES_ON != "cpu":
        config.hook.pytest_deselected(items=[item for item in items if not runs_samples(item)])
        items[:] = [item for item in items if runs_samples(item)]


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts what runs in its background with SIGINT ignored, and children inherit that.

    What tests train with is not noted in their user's folder. Nothing that is imported
    is garbage: looking for it takes a sixth of the time in which tests are collected.
    """
    gc.disable()
    state = tempfile.mkdtemp(prefix="hyperslab-state-")
    os.environ["XDG_STATE_HOME"] = state
    config.add_cleanup(lambda: shutil.rmtree(state, ignore_errors=True))
    if hasattr(config, "workerinput"):  # its tests import that anyway
        import_commands()
    config.add_cleanup(command_server().end)
    with suppress(CannotCompile):  # the installation's kernels may be of older sources
        ready_library(compiled=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    in_gate = config.getoption("--hypothesis-profile", None) == "ci"
    if in_gate and importlib.util.find_spec("cloudpickle"):
        config.add_cleanup(fork_small_children())


OPTIONAL = set(
    """
    diffusers mlflow mlperf_logging monai nbclient nbformat neuralop nibabel
    scipy SimpleITK sklearn triton wandb zarr
    """.split()
)
"""Libraries of the extras: a test that imports one which is not installed is skipped."""


def skip_without_library(error: BaseException | None) -> None:
    """Skip where this error is that an optional library is not there."""
    library = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and library in OPTIONAL:
        pytest.skip(f"{library} is not installed", allow_module_level=True)


class Module(pytest.Module):
    """A file of tests, skipped with the name of the library that its imports lack."""

    def _getobj(self) -> Any:
        try:
            return super()._getobj()
        except self.CollectError as error:
            skip_without_library(error.__cause__)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return Module.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except ModuleNotFoundError as error:
        skip_without_library(error)
        raise


def pytest_collection_finish() -> None:
    """Let collections of garbage leave out what has been imported, which takes them a second.

    They come after more than Python's 700 objects: a tenth of the time of reports was theirs.
    """
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _ranks() -> Iterator[None]:
    """Ranks begin with all that the session has imported, and none outlives it.

    What they say goes where the session's tests say it.
    """
    start_server()
    yield
    close_pool()


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Commands of hyperslab fork from a process that has imported everything."""
    with forked_commands():
        yield


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of reports are composed and not drawn, which takes most of the time of a page.

    For tests of what pages say; what figures show, tests of figures look at.
    """
    from hyperslab.studies.report import canvas

    nothing = '<svg viewBox="0 0 1 1"></svg>'

    def save(figure: object, file: IO[bytes], **options: object) -> None:
        file.write(nothing.encode())

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)
    monkeypatch.setattr(canvas.Canvas, "_draw", lambda self, alt: canvas._inline(nothing, alt))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _rest() -> Iterator[None]:
    yield
    rest_idle_ranks()


@pytest.fixture(autouse=True)
def _log_handlers() -> Iterator[None]:
    """A command prints its logs until its process ends; here the next test is in that process."""
    log = logging.getLogger("hyperslab")
    handlers, level = [*log.handlers], log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)
