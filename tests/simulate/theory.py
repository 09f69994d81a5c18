"""Linear theory and power spectra in plain numpy: nothing here is shared with the simulation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def growth(a: float, omega_m: float) -> float:
    """D(a) / D(1) of a flat universe with a cosmological constant (Heath 1977's integral)."""

    def unnormalised(upper: float) -> float:
        x = np.linspace(1e-6, upper, 20001)
        expansion = np.sqrt(omega_m / x**3 + 1 - omega_m)
        integral = np.trapezoid((x * expansion) ** -3, x)
        return float(expansion[-1] * integral)

    return unnormalised(a) / unnormalised(1.0)


def transfer(k: Array, omega_m: float, h: float, omega_b: float = 0.05) -> Array:
    """The transfer function without wiggles, k in [h/Mpc] (Eisenstein & Hu 1998, 26, 28-31)."""
    theta = 2.7255 / 2.7
    matter, baryons, share = omega_m * h**2, omega_b * h**2, omega_b / omega_m
    sound = 44.5 * np.log(9.83 / matter) / np.sqrt(1 + 10 * baryons**0.75)  # [Mpc]
    alpha = 1 - 0.328 * np.log(431 * matter) * share + 0.38 * np.log(22.3 * matter) * share**2
    gamma = omega_m * h * (alpha + (1 - alpha) / (1 + (0.43 * k * h * sound) ** 4))
    q = k * theta**2 / gamma
    log = np.log(2 * np.e + 1.8 * q)
    return log / (log + (14.2 + 731 / (1 + 62.5 * q)) * q**2)


def linear_power(k: Array, omega_m: float, sigma_8: float, n_s: float, h: float) -> Array:
    """P(k) [(Mpc/h)³] today, normalised to sigma_8."""

    def shape(x: Array) -> Array:
        return x**n_s * transfer(x, omega_m, h) ** 2

    x = np.geomspace(1e-4, 20, 4000)
    ball = 3 * (np.sin(8 * x) - 8 * x * np.cos(8 * x)) / (8 * x) ** 3
    variance = np.trapezoid(shape(x) * ball**2 * x**3 / (2 * np.pi**2), np.log(x))
    return sigma_8**2 * shape(k) / variance


def modes(counts: NDArray[np.integer], box_size: float) -> tuple[Array, NDArray[np.complex128]]:
    """|k| [h/Mpc] and the Fourier modes of the density contrast of counts (S, S, S).

    The modes are divided by the window of nearest-grid-point counting.
    """
    S = counts.shape[0]
    contrast = np.fft.fftn(counts / counts.mean() - 1) / S**3
    n = np.stack(np.meshgrid(*[np.fft.fftfreq(S)] * 3, indexing="ij"))
    return 2 * np.pi * S / box_size * np.sqrt((n**2).sum(0)), contrast / np.sinc(n).prod(0)


def power(
    counts: NDArray[np.integer], box_size: float, low: float, high: float
) -> tuple[float, Array]:
    """The mean power [(Mpc/h)³] of the modes with low <= |k| < high, and these modes' |k|."""
    k, delta = modes(counts, box_size)
    band = (k >= low) & (k < high)
    return float((np.abs(delta[band]) ** 2).mean() * box_size**3), k[band]
