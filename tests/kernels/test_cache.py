"""Compiling fused kernels: what can be missing, foreign or broken (tier: no process; some start
interpreters and the compiler)."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hyperslab.kernels import compile as compiler
from hyperslab.kernels import compile as library
from hyperslab.kernels import epilogue
from hyperslab.kernels.compile import CannotCompile, cached_library, load_library
from tests.kernels.compiled import compiled

try:
    COMPILER = compiler.find_compiler().command
except CannotCompile:
    COMPILER = ()

needs_compiler = pytest.mark.skipif(not COMPILER, reason="no compiler")

RUN = """
import torch, hyperslab.kernels
x = torch.arange(-8.0, 8.0).view(1, 2, 8)
y, marks = torch.ops.hyperslab.chain_forward(x, None, 0.0, [2], False, True, x.dtype)
print(y.sum().item(), marks.tolist())
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv(library.SWITCH, raising=False)
    return tmp_path / "cache" / "hyperslab" / "kernels"


@pytest.fixture(scope="session")
def made() -> Path:
    """A whole library."""
    return compiled()


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that does what its file says with ``$target``, and tells a version."""
    path = tmp_path / "pretend"
    monkeypatch.setenv("CC", str(path))
    return path


def compiles_by(path: Path, words: str, version: str = "1") -> None:
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\n'
        f'for target in "$@"; do :; done\n{words}\n'
    )
    path.chmod(0o700)


def compiled_calls(path: Path) -> int:
    """How often `compiles_by` ``echo >> "$0.calls"`` was run."""
    calls = path.with_name(path.name + ".calls")
    return len(calls.read_text().splitlines()) if calls.exists() else 0


@needs_compiler
def test_compiles_once_for_the_owner_alone(home: Path, made: Path, pretend: Path) -> None:
    compiles_by(pretend, f'cp {made} "$target"')
    path = cached_library()
    assert load_library(path)
    assert [p.name for p in home.iterdir()] == [path.name]
    assert home.stat().st_mode & 0o777 == 0o700
    written = path.stat().st_mtime_ns
    assert cached_library() == path
    assert path.stat().st_mtime_ns == written


@needs_compiler
@pytest.mark.parametrize("harm", ["cut", "changed", "emptied", "a folder"])
def test_what_is_damaged_is_compiled_again(
    harm: str, home: Path, made: Path, pretend: Path
) -> None:
    compiles_by(pretend, f'echo >> "$0.calls"; cp {made} "$target"')
    path = cached_library()
    whole = path.read_bytes()
    if harm == "a folder":
        path.unlink()
        path.mkdir()
        with pytest.raises(CannotCompile):
            cached_library()
        return
    harmed = {"cut": whole[: len(whole) // 2], "emptied": b""}.get(harm)
    path.write_bytes(
        whole[:999] + bytes([whole[999] ^ 1]) + whole[1000:] if harmed is None else harmed
    )
    assert cached_library() == path
    assert path.read_bytes() == whole
    assert compiled_calls(pretend) == 2
    assert load_library(path)


@needs_compiler
def test_another_version_is_compiled_for_itself(home: Path, made: Path, pretend: Path) -> None:
    compiles_by(pretend, f'cp {made} "$target"')
    first = cached_library()
    compiles_by(pretend, f'cp {made} "$target"', version="2")
    assert cached_library() != first


def test_a_compiler_that_is_missing(pretend: Path) -> None:
    with pytest.raises(CannotCompile, match="no C compiler"):
        cached_library()


def test_a_compiler_that_fails(home: Path, pretend: Path) -> None:
    compiles_by(pretend, "echo no such processor >&2; echo more >&2; exit 1")
    with pytest.raises(CannotCompile, match=r"pretend failed: no such processor$"):
        cached_library()
    assert list(home.iterdir()) == []


def test_a_compiler_that_hangs(home: Path, pretend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "TIME_LIMIT", 0.5)
    compiles_by(pretend, "exec sleep 60")
    with pytest.raises(CannotCompile, match="took more than"):
        cached_library()


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
def test_a_folder_that_others_may_write_to(mode: int, home: Path) -> None:
    home.mkdir(parents=True)
    home.chmod(mode)
    with pytest.raises(CannotCompile, match="others may write"):
        cached_library()


def test_a_folder_of_somebody_else(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir(parents=True, mode=0o700)
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(CannotCompile, match="somebody else"):
        cached_library()


def test_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CannotCompile, match="XDG_CACHE_HOME"):
        cached_library()


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_bytes(b"no library")
    with pytest.raises(CannotCompile, match=r"kernels\.so"):
        load_library(path)


def test_references_run_where_nothing_compiles(
    pretend: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert library.library.__wrapped__() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C compiler" in caplog.text
    monkeypatch.setattr(epilogue, "library", lambda: None)
    x = torch.arange(-8.0, 8.0).view(1, 2, 8)
    y, marks = torch.ops.hyperslab.chain_forward(x, None, 0.0, [2], False, True, x.dtype)
    assert torch.equal(y, torch.relu(x).unflatten(2, (4, 2)).mean(3))
    assert marks.tolist() == [0, 254]


def test_the_switch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(library.SWITCH, "0")
    with caplog.at_level(logging.INFO):
        assert library.library.__wrapped__() is None
    assert [record.levelname for record in caplog.records] == ["INFO"]


def python_processes(count: int) -> Sequence[str]:
    started = [
        subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    return [process.communicate(timeout=120)[0] for process in started]


@needs_compiler
@pytest.mark.long
def test_processes_compile_at_once(home: Path) -> None:
    assert python_processes(2) == ["14.0 [0, 254]\n"] * 2
    assert [path.suffix for path in home.iterdir()] == [".so"]


def test_the_switch_in_another_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SWITCH, "0")
    assert python_processes(1) == ["14.0 [0, 254]\n"]
    assert not home.exists()
