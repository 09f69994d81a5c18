"""The packages that are built from this tree hold what they should (tier: processes that build)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # `.ci/run` builds them where a file changes that is not Python

ROOT = Path(__file__).parent.parent
NOT_PACKED = {".gitignore", ".gitattributes", ".dockerignore"}
BUILD = "import sys, setuptools.build_meta as b; print(b.build_{what}(sys.argv[1]))"


def build(what: str, tree: Path, out: Path) -> Path:
    """Build a package as pip does, with the setuptools that is here.

    Kernels are left out: `tests/kernels/test_built_in.py` builds wheels that have them.
    """
    command = [sys.executable, "-c", BUILD.format(what=what), str(out)]
    environment = {**os.environ, "HYPERSLAB_COMPILE": "0"}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.splitlines()[-1]


def tracked() -> list[str]:
    """The files of the repository; those of a folder without git are those of the folder."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no repository, so nothing says which files it has")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in names.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    tree = tmp_path_factory.mktemp("tree")
    for name in tracked():
        copy = tree / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy, follow_symlinks=False)
    out = tmp_path_factory.mktemp("dist")
    with tarfile.open(build("sdist", tree, out)) as archive:
        archive.extractall(out, filter="data")
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    return folder


@pytest.fixture(scope="module")
def installed(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the source distribution builds, in a folder of its own."""
    wheel = build("wheel", sdist, tmp_path_factory.mktemp("wheel"))
    target = tmp_path_factory.mktemp("target")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True, timeout=300)
    return target


def run(installed: Path, *words: str) -> str:
    """A command of the installed package; what else is imported is that of this environment."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    program = installed / "bin" / "hyperslab"
    done = subprocess.run(
        [sys.executable, str(program), *words],
        cwd=installed,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_source_distribution_has_every_file_of_the_repository(sdist: Path) -> None:
    linked = "src/hyperslab/recipe/files"
    missing = [
        name
        for name in tracked()
        if name != linked and name not in NOT_PACKED and not (sdist / name).is_file()
    ]
    assert missing == []
    assert (sdist / linked / "demo.yaml").is_file()


def test_the_wheel_has_recipes_and_says_its_version(installed: Path) -> None:
    listed = run(installed, "recipes")
    for path in (ROOT / "recipes").rglob("*.yaml"):
        assert path.relative_to(ROOT / "recipes").with_suffix("").as_posix() in listed
    run(installed, "recipes", "copy", "demo", "mine")
    copy = installed / "mine" / "demo.yaml"
    assert copy.read_text() == (ROOT / "recipes" / "demo.yaml").read_text()
    assert run(installed, "--version").startswith("hyperslab 0.1.0 (torch ")


def test_the_wheel_is_what_was_run(installed: Path) -> None:
    code = "import hyperslab; print(hyperslab.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=installed,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    assert where.startswith(str(installed))
