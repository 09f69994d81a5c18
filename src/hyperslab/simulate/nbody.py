"""Simulates gravity: initial conditions, particle-mesh steps, particle counts; through `jaxpm`.

`jax`, `jax_cosmo` and `jaxpm` are optional and noisy, and imported here alone.

Legend: P particles and mesh cells per side, S voxels per side, a scale factor. Positions are in
mesh cells, in [0, P) up to the periodic wrap; momenta are a² dx/dt in cells times H_0.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import HyperslabError
from hyperslab.simulate.parameters import OMEGA_B
from hyperslab.util.optional_libraries import how_to_install


@contextmanager
def _pkg_resources_stand_in() -> Iterator[None]:
    """Answers jax_cosmo 0.1.0, which asks the vanished `pkg_resources` for its own version.

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


def import_jax_libraries() -> SimpleNamespace:
    """Imports ``jax``, ``jnp``, ``jc`` (jax_cosmo), ``pm``, ``growth`` (both jaxpm).

    Raises:
        HyperslabError: if the extra ``universe`` is not installed.
    """
    try:
        with _pkg_resources_stand_in():
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


REDSHIFTS = (0.0, 0.5, 1.5, 3.0)
"""Orders the four channels as the published generator does."""

FIRST_A = 0.1
"""Marks where second-order Lagrangian theory hands over to the particle-mesh steps."""

STATE = 3  # arrays of a state: positions, momenta, forces, each (P, P, P, 3)


def scale_factors(steps: int) -> list[NDArray[np.float64]]:
    """Computes the edges of the time steps from FIRST_A to today, an array up to each redshift.

    Steps are even between two redshifts and at most ``(1 - FIRST_A) / steps`` long.
    """
    longest = (1.0 - FIRST_A) / steps
    stops = [FIRST_A, *(1.0 / (1.0 + z) for z in sorted(REDSHIFTS, reverse=True))]
    return [
        np.linspace(a, b, int(np.ceil((b - a) / longest - 1e-9)) + 1)
        for a, b in itertools.pairwise(stops)
    ]


class Nbody:
    """Simulates a universe of particles³ particles counted in size³ voxels at four redshifts.

    Compiled once; the parameters, the box and the noise are arguments, so that every further
    universe only computes.
    """

    def __init__(self, *, size: int, particles: int, steps: int) -> None:
        self.size = size
        self.particles = particles
        self.segments = scale_factors(steps)
        # Deprecations, and 64-bit types narrowed to 32 bits.
        with warnings.catch_warnings(action="ignore"):
            self.lib = import_jax_libraries()
            self._start, self._step, self._count = self._compile()

    def __call__(
        self, physical: NDArray[np.float64], box_size: float, noise: NDArray[np.uint32]
    ) -> NDArray[np.int32]:
        """Computes counts (S, S, S, 4), the last dim over REDSHIFTS, each summing to P³.

        ``physical`` is (Omega_m, sigma_8, n_s, H_0), ``box_size`` this universe's side [Mpc/h],
        ``noise`` (2,) the key of the initial white noise.
        """
        state, factors = self._start(
            np.asarray(physical, np.float32), np.float32(box_size), np.asarray(noise, np.uint32)
        )
        channels = []
        numbers = itertools.count()
        for segment in self.segments:
            for _ in segment[1:]:
                state = self._step(*state, factors[next(numbers)])
            channels.append(np.asarray(self._count(state[0])))
        return np.stack(channels[::-1], axis=-1)

    def _compile(self) -> tuple[Any, Any, Any]:
        jax = self.lib.jax
        P = self.particles
        vectors = jax.ShapeDtypeStruct((P, P, P, 3), np.float32)
        triple = jax.ShapeDtypeStruct((3,), np.float32)
        start = jax.jit(self.start).lower(
            jax.ShapeDtypeStruct((4,), np.float32),
            jax.ShapeDtypeStruct((), np.float32),
            jax.ShapeDtypeStruct((2,), np.uint32),
        )
        step = jax.jit(self.step, donate_argnums=range(STATE)).lower(*[vectors] * STATE, triple)
        return start.compile(), step.compile(), jax.jit(self.count).lower(vectors).compile()

    def start(self, physical: Any, box_size: Any, noise: Any) -> tuple[Any, Any]:
        """Computes the state at FIRST_A by second-order Lagrangian theory, and all factors."""
        jax = self.lib.jax
        jnp = self.lib.jnp
        pm = self.lib.pm
        mesh = (self.particles,) * 3
        field = pm.linear_field(
            mesh,
            (box_size,) * 3,
            self.power(physical),
            jax.random.wrap_key_data(noise, impl="threefry2x32"),
        )
        axis = jnp.arange(self.particles, dtype=jnp.float32)
        lattice = jnp.stack(jnp.meshgrid(axis, axis, axis, indexing="ij"), -1)
        cosmo = self.cosmology(physical)
        shift, momenta, _ = pm.lpt(cosmo, field, particles=lattice, a=FIRST_A, order=2)
        positions = lattice + shift
        return (positions, momenta, self.forces(positions)), self.factors(cosmo)

    def step(self, x: Any, p: Any, force: Any, factors: Any) -> tuple[Any, Any, Any]:
        """Takes a step: kick, drift, kick (Feng et al. 2016, section 2)."""
        p = p + factors[0] * force
        x = x + factors[1] * p
        force = self.forces(x)
        return x, p + factors[2] * force, force

    def count(self, x: Any) -> Any:
        """Counts the particles per voxel (S, S, S).

        The lattice is a quarter of a cell off the voxels' faces. On a face or in the middle, a
        small shift changes the counts too much or not at all; at a quarter that error of the
        linear growth cancels to first order (docs/design/0003-universes.md).
        """
        jnp = self.lib.jnp
        S = self.size
        i = jnp.floor((x + 0.25) * (S / self.particles)).astype(jnp.int32) % S
        flat = (i[..., 0] * S + i[..., 1]) * S + i[..., 2]
        return jnp.bincount(flat.ravel(), length=S**3).reshape(S, S, S)

    def forces(self, x: Any) -> Any:
        return self.lib.pm.pm_forces(x, mesh_shape=(self.particles,) * 3)

    def cosmology(self, physical: Any) -> Any:
        """Makes a new object for each library: both keep growth tables in it, which differ."""
        omega_m, sigma_8, n_s, h_0 = physical
        return self.lib.jc.Cosmology(
            Omega_c=omega_m - OMEGA_B,
            Omega_b=OMEGA_B,
            h=h_0 / 100.0,
            n_s=n_s,
            sigma8=sigma_8,
            Omega_k=0.0,
            w0=-1.0,
            wa=0.0,
        )

    def power(self, physical: Any) -> Any:
        """Returns today's linear power spectrum [(Mpc/h)³], a function of k [h/Mpc], 0 at k = 0."""
        jnp = self.lib.jnp
        k = jnp.logspace(-4.0, 2.5, 512)
        table = self.lib.jc.power.linear_matter_power(self.cosmology(physical), k)

        def power(x: Any) -> Any:
            log_x = jnp.log(jnp.where(x > 0, x, 1.0))
            return jnp.where(x > 0, jnp.exp(jnp.interp(log_x, jnp.log(k), jnp.log(table))), 0.0)

        return power

    def factors(self, cosmo: Any) -> Any:
        """Computes (n, 3) factors of kick, drift, kick (Feng et al. 2016, section 2).

        They make linear growth exact for any step length, which a plain leapfrog does not.
        """
        lib = self.lib
        jnp = self.lib.jnp
        edges = np.concatenate([np.stack([s[:-1], s[1:]]) for s in self.segments], 1)
        a, b = jnp.asarray(edges, jnp.float32)
        middle = jnp.sqrt(a * b)

        def kick(since: Any, until: Any, at: Any) -> Any:
            growth = lib.growth.Gf(cosmo, until) - lib.growth.Gf(cosmo, since)
            expansion = at**2 * jnp.sqrt(lib.jc.background.Esqr(cosmo, at))
            return 1.5 * cosmo.Omega_m * growth / (expansion * lib.growth.dGfa(cosmo, at))

        grown = lib.growth.growth_factor(cosmo, b) - lib.growth.growth_factor(cosmo, a)
        drift = grown / lib.growth.Gf(cosmo, middle)
        return jnp.stack([kick(a, middle, a), drift, kick(middle, b, b)], -1)
