"""Libraries that come with the package: the right one, or none (tier: no process; one long test
builds wheels)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hyperslab.kernels import built_in
from hyperslab.kernels import compile as compiler
from hyperslab.kernels.compile import CannotCompile, load_library, ready_library
from tests.kernels import test_instruction_sets as instruction_sets
from tests.kernels.compiled import compiled

ROOT = Path(__file__).parents[2]
AVX512BF16, AVX512, AVX2 = built_in.VARIANTS


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of libraries beside the sources, as wheels have it; nothing may be compiled."""
    monkeypatch.setattr(built_in, "BUILT", tmp_path / "built")
    monkeypatch.setattr(built_in, "processor_flags", lambda: AVX512.needs)
    monkeypatch.setattr(compiler, "cached_library", lambda **_: Path("the cache"))
    monkeypatch.delenv(compiler.SWITCH, raising=False)
    try:
        library = compiled()
    except CannotCompile:
        pytest.skip("no compiler")
    built_in.BUILT.mkdir()
    for variant in built_in.VARIANTS:
        shutil.copy(library, built_in.BUILT / built_in.library_name(variant))
    return tmp_path / "built"


def test_the_best_that_the_processor_has(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variant, others in ((AVX512BF16, {"amx_tile"}), (AVX512, {"sse2"}), (AVX2, {"avx512f"})):
        flags = variant.needs | others
        monkeypatch.setattr(built_in, "processor_flags", lambda flags=flags: flags)
        assert ready_library() == installed / built_in.library_name(variant)
    for lost in ("avx2", "fma", "bmi2"):  # and what is no Linux on x86 has none at all
        monkeypatch.setattr(built_in, "processor_flags", lambda lost=lost: AVX2.needs - {lost})
        assert ready_library() == Path("the cache")


def test_the_environment_may_ask_for_a_compiler(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiler.SWITCH, "1")
    assert ready_library() == Path("the cache")


@pytest.mark.parametrize("changed", ["a source", "a header", "the flags"])
def test_a_library_of_other_sources_or_flags_is_not_loaded(
    changed: str, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ready_library() == installed / built_in.library_name(AVX512)
    sources = shutil.copytree(built_in.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(built_in, "SOURCES", sources)
    assert ready_library() == installed / built_in.library_name(AVX512)
    if changed == "the flags":
        monkeypatch.setattr(built_in, "FLAGS", (*built_in.FLAGS, "-ffast-math"))
    else:
        file = sources / ("sums.c" if changed == "a source" else "rows.h")
        file.write_text(file.read_text() + "\n")
    assert ready_library() == Path("the cache")


def test_what_is_cut_or_does_not_load_is_not_taken(installed: Path) -> None:
    path = installed / built_in.library_name(AVX512)
    (installed / built_in.library_name(AVX2)).unlink()  # which would be the next one
    whole = path.read_bytes()
    path.unlink()  # it may be loaded
    path.write_bytes(whole[:-1])
    assert ready_library() == Path("the cache")
    path.write_bytes(b"of a newer C library")
    built_in.add_digest(path)
    assert built_in.is_whole(path)
    assert ready_library() == Path("the cache")


@pytest.mark.long  # 40 s: all variants are compiled
def test_wheels(tmp_path: Path) -> None:
    variants = built_in.known_variants()
    if len(variants) < 3:
        pytest.skip("no compiler for x86-64")
    wheel = make_wheel(tmp_path / "compiled")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    built = tmp_path / "site" / "hyperslab" / "kernels" / "built"
    assert {path.name for path in built.iterdir()} == set(map(built_in.library_name, variants))
    here = [v for v in variants if v.needs <= built_in.processor_flags()]
    for variant in here:
        pair = [load_library(compiled()), load_library(built / built_in.library_name(variant))]
        instruction_sets.test_sums_of_many_values(pair)
        instruction_sets.test_gradients_of_many_filters(pair)
    # What is installed finds its library, with no compiler and no cache.
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "CC": "none", "HOME": "/nowhere"}
    environ.pop(compiler.SWITCH, None)
    command = [sys.executable, "-P", "-m", "hyperslab", "compile"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    expected = f"kernels for this processor: {built / built_in.library_name(here[0])}\n"
    assert (done.stdout, done.stderr) == (expected, "")
    pure = make_wheel(tmp_path / "pure", HYPERSLAB_COMPILE="0")
    assert pure.name.endswith("-py3-none-any.whl")
    assert not any(".so" in name for name in zipfile.ZipFile(pure).namelist())


def make_wheel(out: Path, **environ: str) -> Path:
    """Build a wheel of a copy: a build leaves files beside the sources."""
    source = out / "source"
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("built", "*.egg-info")
    )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", out, source], check=True, env={**os.environ, **environ})
    (wheel,) = out.glob("*.whl")
    return wheel
