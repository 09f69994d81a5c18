"""Slurm jobs that go back into the queue (tier: no process but a script in place of `scontrol`)."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest

from hyperslab.errors import RecipeError, Stopped
from hyperslab.launch.restarts import requeue_when_stopped


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of Slurm, and what its `scontrol` was asked to do."""
    asked = tmp_path / "asked"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.delenv("RANK", raising=False)
    return asked


def stop(number: int, *, wanted: bool = True) -> None:
    with pytest.raises(Stopped), requeue_when_stopped(wanted):
        raise Stopped(number, "stopped")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("rank", [None, "0"])
def test_the_main_process_requeues_its_job(
    job: Path, number: int, rank: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    stop(number)
    assert job.read_text() == "requeue 77\n"


def test_nobody_else_does_nor_for_another_reason(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(signal.SIGTERM)
    stop(signal.SIGUSR1, wanted=False)
    with requeue_when_stopped(True):
        pass
    with pytest.raises(RecipeError), requeue_when_stopped(True):
        raise RecipeError("bad")
    monkeypatch.setenv("RANK", "1")
    stop(signal.SIGUSR1)
    assert not job.exists()


def test_what_slurm_refuses_is_said(job: Path, caplog: pytest.LogCaptureFixture) -> None:
    (job.parent / "scontrol").write_text("#!/bin/sh\necho 'Job is not requeueable' >&2; exit 1\n")
    stop(signal.SIGUSR1)
    assert "scontrol requeue 77: Job is not requeueable" in caplog.text
    assert caplog.records[-1].levelno == logging.WARNING


def test_without_slurm_it_is_refused_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(RecipeError, match="not a Slurm job"), requeue_when_stopped(True):
        raise AssertionError
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RecipeError, match="needs Slurm's command `scontrol`"):
        requeue_when_stopped(True).__enter__()
