"""Waiting for data: what a step needs of the files, and what reading ahead cannot hide.

Mathuriya et al. 2018, equation 1: BW_min = b S / t hides the input of a step of t seconds, with b
samples of S bytes. Oyama et al. 2020, section III-B: 64 samples of 512^3 voxels at 240 GB/s take
at least 256 ms without a store.
"""

from __future__ import annotations


def least_bandwidth(samples: float, sample_bytes: float, step: float) -> float:
    """BW_min = b S / t [B/s] (Mathuriya et al. 2018, equation 1).

    8 MB each 0.129 s are the paper's 62 MB/s of a node:

    >>> round(least_bandwidth(1, 8e6, 0.129) / 1e6)
    62
    """
    return samples * sample_bytes / step


def read_seconds(nbytes: float, bandwidth: float) -> float:
    """Of so many bytes [B] at a bandwidth [B/s]; equation 1 solved for t.

    64 samples of 512^3 x 4 int16 take 286 ms at 240 GB/s, and 267 ms at 1 GB each. The "at least
    256 ms" of Oyama et al. 2020, section III-B, are 64 times the 4 ms to which the 4.2 ms of one
    of them are rounded down.

    >>> 64 * int(1e3 * read_seconds(1e9, 240e9))
    256
    >>> round(1e3 * read_seconds(64 * 2**30, 240e9))
    286
    """
    return nbytes / bandwidth


def input_wait(reading: float, step: float) -> float:
    """What of ``reading`` [s] a step of ``step`` [s] does not hide that has it done ahead [s].

    >>> input_wait(0.25, 0.75), input_wait(1.0, 0.75)
    (0.0, 0.25)
    """
    return max(0.0, reading - step)
