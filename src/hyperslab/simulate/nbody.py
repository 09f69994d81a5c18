"""Simulates gravity: initial conditions, particle-mesh steps, particle counts; in plain torch.

Legend: P particles and mesh cells per side, S voxels per side, a scale factor. Positions are in
mesh cells, in [0, P) up to the periodic wrap; momenta are a² dx/dt in cells times H_0. Vectors of
particles are (3, P³).
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
    """Simulates universes of particles³ particles counted in size³ voxels at four redshifts."""

    def __init__(self, *, size: int, particles: int, steps: int) -> None:
        P = particles
        self.size = size
        self.particles = P
        segments = scale_factors(steps)
        self.edges = np.unique(np.concatenate(segments))
        self.shown = np.cumsum([len(one) - 1 for one in segments]).tolist()  # after which steps
        axis = torch.arange(P, dtype=torch.float32)
        self.lattice = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij")).view(3, -1)
        sides = np.fft.fftfreq(P) * P, np.fft.fftfreq(P) * P, np.fft.rfftfreq(P) * P
        n = np.meshgrid(*sides, indexing="ij", sparse=True)
        self.squares = sum(np.rint(x**2).astype(np.int64) for x in n)  # |n|² of a mode
        laplace = -torch.from_numpy(np.maximum(self.squares, 1)) * (2 * np.pi / P) ** 2
        self.inverse_laplace = (torch.from_numpy(self.squares > 0) / laplace).float()

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
        channels = []
        for step, (kick, drift) in enumerate(self.factors(cosmology), start=1):
            p.add_(self.forces(x), alpha=kick)
            x.add_(p, alpha=drift)
            channels += [self.count(x).numpy()] * self.shown.count(step)
        return np.stack(channels[::-1], axis=-1)

    def start(
        self, cosmology: Cosmology, box_size: float, noise: NDArray[np.uint32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes positions and momenta at FIRST_A by second-order Lagrangian theory.

        The second order grows as in a universe of matter alone, as at FIRST_A it nearly is.
        """
        a = np.array([FIRST_A])
        D = float(cosmology.growth(a)[0])
        momentum = float(cosmology.growth_momentum(a)[0])
        first = self.falls(self.linear_modes(cosmology, box_size, noise))
        # The determinants of all pairs of axes in the potential's second derivatives.
        second = torch.zeros_like(first[0])
        for i, j in itertools.combinations(range(3), 2):
            second += slope(first[i], i) * slope(first[j], j) - slope(first[i], j) ** 2
        shift = 3 / 7 * D**2 * self.falls(torch.fft.rfftn(second))
        x = self.lattice + (D * first + shift).view(3, -1)
        return x, momentum * (first + 2 / D * shift).view(3, -1)

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
        low = x.floor()
        beyond = x - low
        first = low.int().remainder_(P)
        second = first + 1
        cells = first, second.masked_fill_(second == P, 0)
        weights = 1 - beyond, beyond
        taps = torch.empty(P**3, 8, dtype=torch.int32)
        parts = torch.empty(P**3, 8)
        for a, (i, j) in enumerate(itertools.product((0, 1), repeat=2)):
            row = torch.add(cells[j][1], cells[i][0], alpha=P).mul_(P)
            weight = weights[i][0] * weights[j][1]
            for k in (0, 1):
                torch.add(row, cells[k][2], out=taps[:, 2 * a + k])
                torch.mul(weight, weights[k][2], out=parts[:, 2 * a + k])
        density = torch.bincount(taps.ravel(), parts.ravel(), minlength=P**3)
        pulls = self.falls(torch.fft.rfftn(density.view(P, P, P)))
        pulls = pulls.view(3, -1).T.contiguous()
        return F.embedding_bag(taps, pulls, mode="sum", per_sample_weights=parts).T.contiguous()

    def falls(self, modes: torch.Tensor) -> torch.Tensor:
        """Computes minus the gradient (3, P, P, P) of the potential of a density's modes."""
        depth = torch.fft.irfftn(modes * -self.inverse_laplace, (self.particles,) * 3)
        return torch.stack([slope(depth, dim) for dim in range(3)])

    def count(self, x: torch.Tensor) -> torch.Tensor:
        """Counts the particles per voxel (S, S, S).

        The lattice is a quarter of a cell off the voxels' faces. On a face or in the middle, a
        small shift changes the counts too much or not at all; at a quarter that error of the
        linear growth cancels to first order (docs/design/0003-universes.md).
        """
        S = self.size
        i, j, k = ((x + 0.25) * (S / self.particles)).floor().long().remainder_(S)
        flat = (i * S + j) * S + k
        return torch.bincount(flat, minlength=S**3).view(S, S, S).int()

    def factors(self, cosmology: Cosmology) -> list[tuple[float, float]]:
        """Computes the factors of kick and drift of each step (Feng et al. 2016, section 2).

        They make linear growth exact for any step length, which a plain leapfrog does not. The
        slope of `Cosmology.growth_momentum` is 1.5 Omega_m D / (a² E), by the growth's equation.
        The second half of a kick is made with the first half of the next: both have one force.
        """
        a = self.edges
        middle = np.sqrt(a[:-1] * a[1:])
        grown = cosmology.growth(a)
        momentum = cosmology.growth_momentum(np.concatenate([a[:1], middle]))
        kicks = np.diff(momentum) / grown[:-1]
        drifts = np.diff(grown) / momentum[1:]
        return list(zip(kicks.tolist(), drifts.tolist(), strict=True))


def slope(field: torch.Tensor, dim: int) -> torch.Tensor:
    """Computes the difference quotient of fourth order along a periodic dim (Feng et al. 2016)."""
    P = field.shape[dim]
    wrapped = field.index_select(dim, torch.arange(-2, P + 2).remainder_(P))
    before2, before, _, after, after2 = (wrapped.narrow(dim, i, P) for i in range(5))
    return (after - before).mul_(8).sub_(after2 - before2).div_(12)
