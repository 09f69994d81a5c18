"""Cuts in proportion, and adaptive windows against torch's pooling (tier: no process)."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from hyperslab.geometry import AdaptiveWindow, Cut, scale_cut


def test_a_map_that_was_halved_grows_back_to_its_cut() -> None:
    for extent, parts in itertools.product(range(2, 40, 2), (1, 2, 3, 4)):
        half = Cut.balanced("depth", extent // 2, parts)
        if not half.thin:
            assert scale_cut(half, extent).bounds == tuple(2 * bound for bound in half.bounds)


def test_every_rank_gets_outputs_if_there_are_enough() -> None:
    cut = Cut("depth", (0, 1, 2, 30))
    for outputs in range(3, 60):
        placed = scale_cut(cut, outputs)
        assert placed.extent == outputs
        assert not placed.thin


def test_adaptive_windows_are_torchs() -> None:
    """The maximum of a rising line is a window's last input, of a falling one its first."""
    for extent, outputs in itertools.product(range(1, 20), range(1, 30)):
        line = torch.arange(extent, dtype=torch.float64)[None]
        last = F.adaptive_max_pool1d(line, outputs)[0]
        first = -F.adaptive_max_pool1d(-line, outputs)[0]
        window = AdaptiveWindow(extent, outputs)
        for o in range(outputs):
            assert window.reads((o, o + 1)) == (first[o], last[o] + 1)
