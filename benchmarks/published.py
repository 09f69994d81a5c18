"""What three papers published of training on Lassen and on Cori, and the runs it was.

Oyama et al. 2020 cut samples along depth alone ("n-way"); the poster is Oyama et al. 2019. None of
these numbers is in a machine file; three constants of `lassen-v100` are fitted to `FITTED`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Run:
    """A network on so many GPUs, ``ways`` of them for a sample, ``samples`` in a mini-batch."""

    network: Literal["cosmoflow", "unet3d", "sc18"]
    width: int
    samples: int
    gpus: int
    ways: int
    batch_norm: bool = False
    input: Literal["store", "direct", "sample"] = "store"
    """Says how samples come: from the memories of other replicas, hidden from files that each reads
    itself, or whole, by one rank that scatters them."""

    @property
    def extents(self) -> dict[str, int]:
        return {"data": self.gpus // self.ways, "depth": self.ways}


@dataclass(frozen=True)
class SpeedUp:
    """Samples per second of ``after`` over those of ``before``."""

    name: str
    where: str
    published: float
    before: Run
    after: Run


def _cosmoflow(samples: int, gpus: int, ways: int, width: int = 512) -> Run:
    return Run("cosmoflow", width, samples, gpus, ways)


def _poster(
    samples: int,
    gpus: int,
    ways: int,
    width: int = 512,
    input: Literal["direct", "sample"] = "direct",
) -> Run:
    """Of the poster, which had two readers: "Conduit" and "Direct I/O"."""
    return Run("cosmoflow", width, samples, gpus, ways, input=input)


def _unet(samples: int, gpus: int, ways: int) -> Run:
    return Run("unet3d", 256, samples, gpus, ways, batch_norm=True)


def _weak(name: str, where: str, published: float, before: Run, gpus: int) -> SpeedUp:
    """With as many samples per GPU on more GPUs."""
    values = vars(before) | {"samples": before.samples * gpus // before.gpus, "gpus": gpus}
    return SpeedUp(name, where, published, before, Run(**values))


STRONG = (
    SpeedUp("CosmoFlow 512³, N=16, 128 to 512 GPUs", "2020, V-B", 1.98,
            _cosmoflow(16, 128, 8), _cosmoflow(16, 512, 32)),
    SpeedUp("CosmoFlow 512³, N=64, 512 to 2048 GPUs", "2020, V-B", 1.77,
            _cosmoflow(64, 512, 8), _cosmoflow(64, 2048, 32)),
    SpeedUp("CosmoFlow 512³, N=4, 32 to 64 GPUs", "2020, fig. 6", 1.66,
            _cosmoflow(4, 32, 8), _cosmoflow(4, 64, 16)),
    SpeedUp("U-Net 256³, N=16, 256 to 512 GPUs", "2020, V-B", 1.42,
            _unet(16, 256, 16), _unet(16, 512, 32)),
    SpeedUp("CosmoFlow 512³, N=1, 4 to 16 GPUs", "poster", 2.28,
            _poster(1, 4, 4, input="sample"), _poster(1, 16, 16, input="sample")),
    SpeedUp("CosmoFlow 512³, N=64, 256 to 512 GPUs", "poster", 1.19,
            _poster(64, 256, 4), _poster(64, 512, 8)),
)  # fmt: skip

WEAK = (
    _weak("CosmoFlow 512³, 8-way, 8 to 2048 GPUs", "2020, V-C", 147.31, _cosmoflow(1, 8, 8), 2048),
    _weak("CosmoFlow 512³, 16-way, 16 to 2048 GPUs", "2020, V-C", 71.32,
          _cosmoflow(1, 16, 16), 2048),
    _weak("CosmoFlow 512³, 32-way, 32 to 2048 GPUs", "2020, V-C", 37.2,
          _cosmoflow(1, 32, 32), 2048),
    _weak("CosmoFlow 128³, 8 samples a GPU, 4 to 512 GPUs", "2020, V-C", 65.4,
          _cosmoflow(32, 4, 1, width=128), 512),
    _weak("U-Net 256³, 32-way, 32 to 1024 GPUs", "2020, V-C", 28.4, _unet(1, 32, 32), 1024),
    _weak("CosmoFlow 128³, 4 to 512 GPUs", "poster", 119, _poster(32, 4, 1, width=128), 512),
    _weak("CosmoFlow 256³, 4 to 512 GPUs", "poster", 120, _poster(4, 4, 1, width=256), 512),
    _weak("CosmoFlow 512³, 4-way, 4 to 512 GPUs", "poster", 111, _poster(1, 4, 4), 512),
)  # fmt: skip
"""The poster does not say how many samples a GPU has: 8 of 128³ as in the paper, 1 of 256³."""

FITTED = tuple(case for at, case in enumerate((*STRONG, *WEAK)) if at % 2 == 0)
"""Every second one, as they stand here: the rest is predicted."""

FASTEST = _poster(128, 512, 4)
FASTEST_FLOPS = 1.42e15
"""[flop/s] of the poster, N=128 on 512 GPUs."""


@dataclass(frozen=True)
class Kernels:
    """Table II: time [s] and performance relative to the local kernels of a layer, or of all."""

    ways: int
    layer: str
    seconds: float
    relative: float


TABLE_2 = (
    Kernels(8, "all", 0.1429, 0.956),
    Kernels(32, "all", 0.0488, 0.824),
    Kernels(8, "conv1", 0.0739, 0.938),
    Kernels(32, "conv1", 0.0235, 0.647),
)

LEAST = (
    ("CosmoFlow 512³", 8, Run("cosmoflow", 512, 1, 1, 1)),
    ("CosmoFlow 512³, batch norm", 8, Run("cosmoflow", 512, 1, 1, 1, batch_norm=True)),
    ("U-Net 256³", 16, Run("unet3d", 256, 1, 1, 1, batch_norm=True)),
)
"""GPUs for a sample. 2020, V-C: 4 would store the first, but run out of memory."""

READING = 0.256
"""[s] at least for 64 samples of 1 GiB (2020, III-B)."""

NODES = 8192
EFFICIENCY = 0.77
"""Of 8,192 nodes of Cori, one sample of 128³ each, over one (Mathuriya et al. 2018, V-D)."""

EPOCH = 3.35
"""[s] on 8,192 nodes, each of which sees 20 samples (the same)."""


def cori(nodes: int) -> Run:
    """The network of Mathuriya et al. 2018 on so many nodes, one sample each."""
    return Run("sc18", 128, nodes, nodes, 1, input="direct")
