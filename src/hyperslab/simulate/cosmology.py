"""Computes linear theory of a flat universe with a cosmological constant: expansion, growth, power.

Arrays of numpy in float64. Wave numbers in [h/Mpc], a scale factor with a = 1 today.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

TEMPERATURE = 2.7255 / 2.7
"""Gives the microwave background's temperature today [2.7 K]."""

NODES, WEIGHTS = np.polynomial.legendre.leggauss(64)


@dataclass(frozen=True, slots=True)
class Cosmology:
    """Holds the densities of matter and of its baryons, sigma_8, the spectral index and h."""

    omega_m: float
    omega_b: float
    sigma_8: float
    n_s: float
    h: float

    def expansion(self, a: Array) -> Array:
        """Computes H / H_0."""
        return np.sqrt(self.omega_m / a**3 + 1 - self.omega_m)

    def growth(self, a: Array) -> Array:
        """Computes D, which is 1 today (Heath 1977)."""
        return self._growing(a) / self._growing(np.ones(1))

    def growth_momentum(self, a: Array) -> Array:
        """Computes a³ E dD/da: momenta of linear theory are this times displacements."""
        E = self.expansion(a)
        slope = (1 - 1.5 * self.omega_m / a * self._growing(a)) / E
        return slope / self._growing(np.ones(1))

    def _growing(self, a: Array) -> Array:
        """Computes E ∫ (a E)⁻³ da from 0, by Gauss's rule in the square root of a."""
        root = np.sqrt(a)[..., None] * (NODES + 1) / 2
        integrand = 2 * root * (root**2 * self.expansion(root**2)) ** -3
        integral = (integrand * WEIGHTS).sum(-1) * np.sqrt(a) / 2
        return self.expansion(a) * integral

    def power(self, k: Array) -> Array:
        """Computes today's linear power [(Mpc/h)³]: sigma_8 is its deviation in 8 Mpc/h; 0 at 0."""

        def shape(x: Array) -> Array:
            return x**self.n_s * self.transfer(x) ** 2

        x = np.geomspace(1e-4, 1e2, 4096)
        ball = 3 * (np.sin(8 * x) - 8 * x * np.cos(8 * x)) / (8 * x) ** 3
        variance = np.trapezoid(shape(x) * ball**2 * x**3, np.log(x)) / (2 * np.pi**2)
        inside = shape(np.where(k > 0, k, 1.0))
        return np.where(k > 0, self.sigma_8**2 / variance * inside, 0.0)

    def transfer(self, k: Array) -> Array:
        """Computes the transfer function with acoustic waves; numbers as in Eisenstein & Hu 1998.

        Equations 2 to 24; lengths are in Mpc there, and wave numbers in 1/Mpc.
        """
        k = k * self.h
        matter, baryons = self.omega_m * self.h**2, self.omega_b * self.h**2
        share = self.omega_b / self.omega_m
        z_equal = 2.50e4 * matter / TEMPERATURE**4
        k_equal = 7.46e-2 * matter / TEMPERATURE**2
        b1 = 0.313 * matter**-0.419 * (1 + 0.607 * matter**0.674)
        b2 = 0.238 * matter**0.223
        z_drag = 1291 * matter**0.251 / (1 + 0.659 * matter**0.828) * (1 + b1 * baryons**b2)
        r_drag, r_equal = (31.5 * baryons / TEMPERATURE**4 * 1e3 / z for z in (z_drag, z_equal))
        ratio = (np.sqrt(1 + r_drag) + np.sqrt(r_drag + r_equal)) / (1 + np.sqrt(r_equal))
        sound = 2 / (3 * k_equal) * np.sqrt(6 / r_equal) * np.log(ratio)
        k_silk = 1.6 * baryons**0.52 * matter**0.73 * (1 + (10.4 * matter) ** -0.95)

        def pressureless(alpha: float, beta: float) -> Array:
            q = k / (13.41 * k_equal)
            log = np.log(np.e + 1.8 * beta * q)
            return log / (log + (14.2 / alpha + 386 / (1 + 69.9 * q**1.08)) * q**2)

        a1 = (46.9 * matter) ** 0.670 * (1 + (32.1 * matter) ** -0.532)
        a2 = (12.0 * matter) ** 0.424 * (1 + (45.0 * matter) ** -0.582)
        alpha_c = a1**-share * a2 ** -(share**3)
        c1 = 0.944 / (1 + (458 * matter) ** -0.708)
        c2 = (0.395 * matter) ** -0.0266
        beta_c = 1 / (1 + c1 * ((1 - share) ** c2 - 1))
        mixed = 1 / (1 + (k * sound / 5.4) ** 4)
        cold = mixed * pressureless(1, beta_c) + (1 - mixed) * pressureless(alpha_c, beta_c)

        y = (1 + z_equal) / (1 + z_drag)
        root = np.sqrt(1 + y)
        G = y * (-6 * root + (2 + 3 * y) * np.log((root + 1) / (root - 1)))
        alpha_b = 2.07 * k_equal * sound * (1 + r_drag) ** -0.75 * G
        beta_b = 0.5 + share + (3 - 2 * share) * np.sqrt((17.2 * matter) ** 2 + 1)
        beta_node = 8.41 * matter**0.435
        shifted = sound / (1 + (beta_node / (k * sound)) ** 3) ** (1 / 3)
        damped = alpha_b / (1 + (beta_b / (k * sound)) ** 3) * np.exp(-((k / k_silk) ** 1.4))
        waves = pressureless(1, 1) / (1 + (k * sound / 5.2) ** 2) + damped
        baryonic = waves * np.sinc(k * shifted / np.pi)
        return np.asarray(share * baryonic + (1 - share) * cold)
