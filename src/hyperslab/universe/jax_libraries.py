"""The one place that imports `jax`, `jax_cosmo` and `jaxpm`, which are optional and noisy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

from hyperslab.errors import HyperslabError
from hyperslab.optional_libraries import how_to_install


@contextmanager
def quiet() -> Iterator[None]:
    """Without the libraries' warnings: deprecations, and 64-bit types narrowed to 32 bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _pkg_resources() -> Iterator[None]:
    """jax_cosmo 0.1.0 asks `pkg_resources` for its own version; setuptools 82 has it no longer.

    Where it is missing, a stand-in answers during the import.
    """
    name = "pkg_resources"
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        yield
        return
    stand_in = ModuleType(name)
    vars(stand_in)["get_distribution"] = importlib.metadata.distribution
    vars(stand_in)["DistributionNotFound"] = importlib.metadata.PackageNotFoundError
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]


def import_libraries() -> SimpleNamespace:
    """The modules: ``jax``, ``jnp``, ``jc`` (jax_cosmo), ``pm`` and ``growth`` (both jaxpm).

    Raises:
        HyperslabError: if the extra ``universe`` is not installed.
    """
    try:
        with quiet(), _pkg_resources():
            import jax
            import jax.numpy as jnp
            import jax_cosmo as jc
            from jaxpm import growth, pm
    except ImportError as error:
        raise HyperslabError(
            f"simulating universes needs more libraries ({error}):\n"
            f"    {how_to_install('universe')}"
        ) from error
    return SimpleNamespace(jax=jax, jnp=jnp, jc=jc, pm=pm, growth=growth)
