"""Simulates gravity: initial conditions, particle-mesh steps, particle counts; in plain torch.

Legend: P particles and mesh cells per side, S voxels per side, a scale factor. Positions are in
mesh cells, in [0, P) up to the periodic wrap; momenta are a² dx/dt in cells times H_0. Vectors of
particles are (P³, 3).
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from hyperslab.simulate.cosmology import Cosmology
from hyperslab.simulate.parameters import OMEGA_B

REDSHIFTS = (0.0, 0.5, 1.5, 3.0)
"""Orders the four channels as the published generator does."""

FIRST_A = 0.1
"""Marks where second-order Lagrangian theory hands over to the particle-mesh steps."""


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
    """Simulates a universe of particles³ particles counted in size³ voxels at four redshifts."""

    def __init__(self, *, size: int, particles: int, steps: int) -> None:
        P = particles
        self.size = size
        self.particles = P
        self.segments = scale_factors(steps)
        axis = torch.arange(P, dtype=torch.float32)
        self.lattice = torch.cartesian_prod(axis, axis, axis)
        sides = np.fft.fftfreq(P) * P, np.fft.fftfreq(P) * P, np.fft.rfftfreq(P) * P
        n = np.meshgrid(*sides, indexing="ij", sparse=True)
        self.squares = sum(np.rint(x**2).astype(np.int64) for x in n)  # |n|² of a mode
        waves = [torch.from_numpy(2 * np.pi / P * x) for x in n]
        laplace = -torch.from_numpy(np.maximum(self.squares, 1)) * (2 * np.pi / P) ** 2
        self.inverse_laplace = (torch.from_numpy(self.squares > 0) / laplace).float()
        # Of fourth order (Feng et al. 2016): 0 for the shortest waves, which have no sign.
        self.gradient = [1j * (8 * w.sin() - (2 * w).sin()).float() / 6 for w in waves]

    def __call__(
        self, physical: NDArray[np.float64], box_size: float, noise: NDArray[np.uint32]
    ) -> NDArray[np.int32]:
        """Computes counts (S, S, S, 4), the last dim over REDSHIFTS, each summing to P³.

        ``physical`` is (Omega_m, sigma_8, n_s, H_0), ``box_size`` this universe's side [Mpc/h],
        ``noise`` (2,) the seed of the initial white noise.
        """
        omega_m, sigma_8, n_s, h_0 = map(float, physical)
        cosmology = Cosmology(omega_m, OMEGA_B, sigma_8, n_s, h_0 / 100.0)
        x, p = self.start(cosmology, box_size, noise)
        force = self.forces(x)
        channels = []
        for segment in self.segments:
            for kick, drift, last_kick in self.factors(cosmology, segment):
                # Kick, drift, kick (Feng et al. 2016, section 2).
                p += kick * force
                x += drift * p
                force = self.forces(x)
                p += last_kick * force
            channels.append(self.count(x).numpy())
        return np.stack(channels[::-1], axis=-1)

    def start(
        self, cosmology: Cosmology, box_size: float, noise: NDArray[np.uint32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes positions and momenta at FIRST_A by second-order Lagrangian theory.

        The second order grows as in a universe of matter alone, as at FIRST_A it nearly is.
        """
        P = self.particles
        a = np.array([FIRST_A])
        D = float(cosmology.growth(a)[0])
        momentum = float(cosmology.growth_momentum(a)[0])
        modes = self.linear_modes(cosmology, box_size, noise)
        first = self.falls(modes)
        # The determinants of all pairs of axes in the potential's second derivatives.
        potential = modes * self.inverse_laplace
        second = torch.zeros(P, P, P)
        for i, j in itertools.combinations(range(3), 2):
            ii, jj, ij = (
                self.inverse(self.gradient[m] * self.gradient[n] * potential)
                for m, n in ((i, i), (j, j), (i, j))
            )
            second += ii * jj - ij**2
        shift = 3 / 7 * D**2 * self.falls(torch.fft.rfftn(second))
        return self.lattice + D * first + shift, momentum * (first + 2 / D * shift)

    def linear_modes(
        self, cosmology: Cosmology, box_size: float, noise: NDArray[np.uint32]
    ) -> torch.Tensor:
        """Draws the Fourier modes of today's linear density contrast."""
        P = self.particles
        white = np.random.default_rng(noise).standard_normal((P, P, P), np.float32)
        k = 2 * np.pi / box_size * np.sqrt(np.arange(self.squares.max() + 1))
        spread = np.sqrt(cosmology.power(k) * (P / box_size) ** 3).astype(np.float32)
        return torch.fft.rfftn(torch.from_numpy(white)) * torch.from_numpy(spread[self.squares])

    def forces(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the forces on particles: painted on the mesh and read there, by clouds in cells.

        Painting is the adjoint of reading: cells and weights of a particle are the same.
        """
        P = self.particles
        x = x.T.contiguous()
        low = x.floor()
        first = low.int() % P
        cells = first, torch.where(first + 1 == P, 0, first + 1)
        weights = 1 - (x - low), x - low
        taps = torch.empty(P**3, 8, dtype=torch.int32)
        parts = torch.empty(P**3, 8)
        for a, (i, j) in enumerate(itertools.product((0, 1), repeat=2)):
            row = (cells[i][0] * P + cells[j][1]) * P
            weight = weights[i][0] * weights[j][1]
            for k in (0, 1):
                torch.add(row, cells[k][2], out=taps[:, 2 * a + k])
                torch.mul(weight, weights[k][2], out=parts[:, 2 * a + k])
        density = torch.bincount(taps.ravel(), parts.ravel(), minlength=P**3)
        pull = self.falls(torch.fft.rfftn(density.view(P, P, P)))
        return F.embedding_bag(taps, pull, mode="sum", per_sample_weights=parts)

    def falls(self, modes: torch.Tensor) -> torch.Tensor:
        """Computes minus the gradient of the potential of a density's modes, at lattice points."""
        potential = modes * self.inverse_laplace
        pulls = [self.inverse(-gradient * potential) for gradient in self.gradient]
        return torch.stack(pulls, -1).view(-1, 3)

    def inverse(self, modes: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfftn(modes, (self.particles,) * 3)

    def count(self, x: torch.Tensor) -> torch.Tensor:
        """Counts the particles per voxel (S, S, S).

        The lattice is a quarter of a cell off the voxels' faces. On a face or in the middle, a
        small shift changes the counts too much or not at all; at a quarter that error of the
        linear growth cancels to first order (docs/design/0003-universes.md).
        """
        S = self.size
        i, j, k = (((x + 0.25) * (S / self.particles)).floor().long() % S).unbind(-1)
        flat = (i * S + j) * S + k
        return torch.bincount(flat, minlength=S**3).view(S, S, S).int()

    def factors(
        self, cosmology: Cosmology, edges: NDArray[np.float64]
    ) -> list[tuple[float, float, float]]:
        """Computes the factors of kick, drift, kick of each step (Feng et al. 2016, section 2).

        They make linear growth exact for any step length, which a plain leapfrog does not. The
        slope of `Cosmology.growth_momentum` is 1.5 Omega_m D / (a² E), by the growth's equation.
        """
        a, b = edges[:-1], edges[1:]
        middle = np.sqrt(a * b)
        grown, momentum = cosmology.growth, cosmology.growth_momentum
        kick = (momentum(middle) - momentum(a)) / grown(a)
        drift = (grown(b) - grown(a)) / momentum(middle)
        last = (momentum(b) - momentum(middle)) / grown(b)
        steps = zip(kick.tolist(), drift.tolist(), last.tolist(), strict=True)
        return list(steps)
