"""The figure of a step: what a rank did when, row by row (Oyama et al. 2020, figure 6)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.patches import Patch

from hyperslab.report.figures.svg import FIRST, MUTED, SECOND, THIRD, Canvas, Picture
from hyperslab.report.number_format import number
from hyperslab.train.profile.schema import UNDER_WAY, StepTimes, TimelineSpan

PIXELS = 1200
"""Pieces that lie closer than the figure is wide by this are drawn as one."""


@dataclass(frozen=True, slots=True)
class Stroke:
    """How a kind of pieces is drawn: in which line, colour, opacity and height (of 1)."""

    line: str
    kind: str
    colour: str
    alpha: float
    height: float


STROKES = (
    Stroke("compute", "framework", FIRST, 0.18, 0.8),
    Stroke("compute", "operators", FIRST, 0.5, 0.8),
    Stroke("compute", "convolutions", FIRST, 1.0, 0.8),
    Stroke("halo", f"halos {UNDER_WAY}", SECOND, 0.35, 0.3),
    Stroke("halo", "halos", SECOND, 1.0, 0.8),
    Stroke("statistics", "statistics", SECOND, 1.0, 0.8),
    Stroke("gradients", f"gradients {UNDER_WAY}", SECOND, 0.35, 0.3),
    Stroke("gradients", "gradients", SECOND, 1.0, 0.8),
    Stroke("waiting for data", "data", THIRD, 1.0, 0.8),
    Stroke("agreement", "vote", MUTED, 1.0, 0.8),
)
LEGEND = (
    ("convolutions", FIRST, 1.0),
    ("other operators", FIRST, 0.5),
    ("Python, torch", FIRST, 0.18),
    ("held up", SECOND, 1.0),
    ("under way", SECOND, 0.35),
    ("no data", THIRD, 1.0),
)


def timeline_of(steps: Sequence[tuple[str, StepTimes]]) -> Picture:
    """Steps one above the other on one scale; each with its title."""
    lines = [line for line in dict.fromkeys(s.line for s in STROKES) if _used(line, steps)]
    tall = len(lines) + 1.2  # with its title
    canvas = Canvas("timeline", width=880, height=round(75 + 26 * tall * len(steps)))
    axes = canvas.axes
    longest = max(step.seconds for _, step in steps)
    ticks = []
    for place, (title, step) in enumerate(steps):
        top = -place * tall
        at = {line: top - 1 - i for i, line in enumerate(lines)}
        ticks += list(at.items())
        axes.text(0, top - 0.2, title, fontsize=12, fontweight="bold", va="center")
        for stroke in STROKES:
            if stroke.line in at:
                spans = step.spans.get(stroke.kind, ())
                pieces = [(1e3 * a, 1e3 * (b - a)) for a, b in merged(spans, longest / PIXELS)]
                box = (at[stroke.line] - stroke.height / 2, stroke.height)
                axes.broken_barh(
                    pieces, box, facecolors=stroke.colour, alpha=stroke.alpha, linewidth=0
                )
    axes.set_yticks([y for _, y in ticks], [line for line, _ in ticks])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set(xlim=(0, 1e3 * longest), xlabel="after the step's begin [ms]")
    axes.set_ylim(-len(steps) * tall + 0.4, 0.3)
    patches = [Patch(facecolor=colour, alpha=alpha, label=text) for text, colour, alpha in LEGEND]
    canvas.legend(handles=patches)
    told = "; ".join(f"{title}: {number(1e3 * step.seconds)} ms" for title, step in steps)
    return canvas.picture(
        title="A step",
        alt=f"Timeline of a training step by row. {told}.",
        caption="Thick: the rank computes, or is held up. Thin: messages travel while it works on. "
        "Pieces shorter than a pixel are drawn as one with their neighbours.",
    )


def merged(spans: Iterable[TimelineSpan], gap: float) -> list[tuple[float, float]]:
    """Begin and end of spans, those together that lie less than ``gap`` [s] apart."""
    result: list[tuple[float, float]] = []
    for begin, end, _ in sorted(spans):
        if result and begin - result[-1][1] < gap:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def _used(line: str, steps: Sequence[tuple[str, StepTimes]]) -> bool:
    kinds = [stroke.kind for stroke in STROKES if stroke.line == line]
    return any(step.spans.get(kind) for kind in kinds for _, step in steps)
