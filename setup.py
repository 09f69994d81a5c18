"""Puts compiled kernels into a wheel, and beside an editable install, where a compiler is there.

Without one, or with HYPERSLAB_COMPILE=0, the wheel is pure Python, and `hyperslab compile` compiles
them.
"""

import functools
import os
import runpy
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

BUILT_IN = Path("src/hyperslab/kernels/built_in.py")


@functools.cache
def built_in():
    """Load the module without its package, which imports torch."""
    return runpy.run_path(str(BUILT_IN))


@functools.cache
def variants():
    """List what the wheel gets."""
    return () if os.environ.get("HYPERSLAB_COMPILE") == "0" else built_in()["known_variants"]()


class WithKernels(Distribution):
    """A wheel with compiled libraries is one for this platform: it lies in platlib."""

    def has_ext_modules(self):
        return bool(variants())


class BuildKernels(build_py):
    """Compiles the variants; beside an editable install the one for this processor alone."""

    def run(self):
        super().run()
        wanted, folder = variants(), Path(self.build_lib, "hyperslab/kernels/built")
        if self.editable_mode:
            here, folder = built_in()["processor_flags"](), BUILT_IN.parent / "built"
            wanted = [variant for variant in wanted if variant.needs <= here][:1]
            names = [built_in()["library_name"](variant) for variant in wanted]
            if all(built_in()["is_whole"](folder / name) for name in names):
                return  # pip installs anew for every extra
        if not wanted:
            return
        try:
            built_in()["build"](folder, wanted)
        except (OSError, subprocess.CalledProcessError) as error:
            self.warn(f"the kernels are not built, `hyperslab compile` does it: {error}")


class AnyPython(bdist_wheel):
    """The libraries know no Python: one wheel is for all of its versions."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(
    distclass=WithKernels,
    ext_modules=[],
    cmdclass={"build_py": BuildKernels, "bdist_wheel": AnyPython},
)
