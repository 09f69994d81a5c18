"""Draws the time of a step against ranks, with and without spatially parallel reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PAPER = "#fdfdfc"
INK = "#1c1f24"
MUTED = "#5b626d"
RULE = "#d9dbd6"
"""Colours of `hyperslab.studies.report.style`."""

WAYS = {
    "read": ("each rank reads its box", "#0072b2", "-", "o"),
    "scattered": ("one rank reads the sample and sends boxes", "#b84a00", "--", "s"),
}
IDEAL = "step of one rank / ranks"
STYLE = {
    "font.size": 10,
    "svg.fonttype": "path",
    "svg.hashsalt": "hyperslab",  # the same picture is the same file
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid.axis": "y",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
}


def draw(scale: dict[str, Any], where: dict[str, Any], path: Path) -> None:
    """Two panels: the step, and how much of it was waiting for data."""
    ranks = [int(n) for n in scale]
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(9.6, 4.2), sharex=True, layout="constrained")
        for axes, what in zip(panels, ("seconds", "wait"), strict=True):
            _panel(axes, scale, ranks, what, where["cores"])
        _ideal(panels[0], scale, ranks)
        panels[0].set_title("time of a step", loc="left", fontsize=11)
        panels[1].set_title("of it waiting for data", loc="left", fontsize=11)
        handles, words = panels[0].get_legend_handles_labels()
        order = sorted(range(len(words)), key=lambda i: words[i] == IDEAL)
        figure.legend(
            [handles[i] for i in order],
            [words[i] for i in order],
            loc="outside lower center",
            ncols=len(words),
            frameon=False,
            handlelength=2.6,
        )
        figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _panel(axes: plt.Axes, scale: dict[str, Any], ranks: list[int], what: str, cores: int) -> None:
    """Medians, with bars from the least to the most."""
    for name, (words, colour, line, marker) in WAYS.items():
        of = [scale[str(n)][name][what] for n in ranks]
        middle = [1e3 * value["median"] for value in of]
        spread = [
            [1e3 * (value["median"] - value["min"]) for value in of],
            [1e3 * (value["max"] - value["median"]) for value in of],
        ]
        axes.errorbar(
            ranks,
            middle,
            spread,
            label=words,
            color=colour,
            linestyle=line,
            marker=marker,
            linewidth=2,
            markersize=7,
            elinewidth=1,
            capsize=3,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.set_xlim(ranks[0] / 1.25, ranks[-1] * 1.25)
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])  # with room for words above
    axes.set_xlabel("ranks")
    axes.set_ylabel("[ms]")
    _more_ranks_than_cores(axes, ranks, cores)


def _more_ranks_than_cores(axes: plt.Axes, ranks: list[int], cores: int) -> None:
    if ranks[-1] > cores:
        axes.axvspan(cores * 2**0.5, ranks[-1] * 1.25, color=RULE, alpha=0.45, linewidth=0)
        axes.annotate(
            f"more ranks than\nthe {cores} cores",
            (1, 1),
            xycoords="axes fraction",
            xytext=(-6, -6),
            textcoords="offset points",
            ha="right",
            va="top",
            color=MUTED,
            fontsize=9,
        )


def _ideal(axes: plt.Axes, scale: dict[str, Any], ranks: list[int]) -> None:
    first = 1e3 * scale[str(ranks[0])]["read"]["seconds"]["median"] * ranks[0]
    axes.plot(ranks, [first / n for n in ranks], ":", color=MUTED, linewidth=1.2, label=IDEAL)
