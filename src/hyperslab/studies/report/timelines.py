"""Writes the chapter on what a step is made of: its timeline, its categories, its layers.

The figure shows what a rank did when, row by row (Oyama et al. 2020, figure 6).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib.patches import Patch

from hyperslab.studies.number_format import DASH, number, times
from hyperslab.studies.report.canvas import FIRST, MUTED, SECOND, THIRD, Canvas, Picture
from hyperslab.studies.report.html import Block, Chapter, Figures, Notice, Paragraph
from hyperslab.studies.run_folder import Run
from hyperslab.studies.table import Table, TableCell, bar_cell
from hyperslab.train.profile import (
    UNDER_WAY,
    LayerTime,
    Profile,
    Stage,
    StepTimes,
    TimelineRow,
    TimelineSpan,
)

FIGURE_PIXELS = 1200
"""Joins pieces that lie closer than the figure is wide by this."""


@dataclass(frozen=True, slots=True)
class Stroke:
    """Says how a kind of pieces is drawn: in which line, colour, opacity and height (of 1)."""

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
TIMELINE_LEGEND = (
    ("convolutions", FIRST, 1.0),
    ("other operators", FIRST, 0.5),
    ("Python, torch", FIRST, 0.18),
    ("held up", SECOND, 1.0),
    ("under way", SECOND, 0.35),
    ("no data", THIRD, 1.0),
)


def timeline_of(steps: Sequence[tuple[str, StepTimes]]) -> Picture:
    """Draws steps one above the other on one scale, each with its title."""
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
                pieces = [
                    (1e3 * a, 1e3 * (b - a))
                    for a, b in merged_spans(spans, longest / FIGURE_PIXELS)
                ]
                box = (at[stroke.line] - stroke.height / 2, stroke.height)
                axes.broken_barh(
                    pieces, box, facecolors=stroke.colour, alpha=stroke.alpha, linewidth=0
                )
    axes.set_yticks([y for _, y in ticks], [line for line, _ in ticks])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set(xlim=(0, 1e3 * longest), xlabel="after the step's begin [ms]")
    axes.set_ylim(-len(steps) * tall + 0.4, 0.3)
    patches = [
        Patch(facecolor=colour, alpha=alpha, label=text) for text, colour, alpha in TIMELINE_LEGEND
    ]
    canvas.legend(handles=patches)
    told = "; ".join(f"{title}: {number(1e3 * step.seconds)} ms" for title, step in steps)
    return canvas.picture(
        title="A step",
        alt=f"Timeline of a training step by row. {told}.",
        caption="Thick: the rank computes, or is held up. Thin: messages travel while it works on. "
        "Pieces shorter than a pixel are drawn as one with their neighbours.",
    )


def merged_spans(spans: Iterable[TimelineSpan], gap: float) -> list[tuple[float, float]]:
    """Joins spans that lie less than ``gap`` [s] apart: begins and ends."""
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


CATEGORIES: dict[str, tuple[TimelineRow, ...]] = {
    "convolutions": ("convolutions",),
    "other operators": ("operators",),
    "communication: halos": ("halos",),
    "communication: statistics": ("statistics",),
    "communication: gradients": ("gradients",),
    "waiting for data": ("data",),
    "agreement on the step": ("vote",),
    "Python and torch between operators": ("framework",),
}
"""Groups a step's time as figure 3 of Mathuriya et al. 2018; the rest is named beside it."""


def timelines(run: Run) -> Chapter:
    """Shows a profiled step of the main rank, with the other run's where there is one."""
    return Chapter("timelines", "Timeline of a step", list(_timeline_parts(run)))


def _timeline_parts(run: Run) -> Iterator[Block]:
    runs = [run, *([run.beside] if run.beside is not None else [])]
    shown = []
    for one in runs:
        main = one.profiles[0] if one.profiles else None
        if main is None or main.median is None:
            yield _missing(one)
        else:
            shown.append((one, main, main.median))
    if not shown:
        return
    titles = [(_title(one, main, step), step) for one, main, step in shown]
    yield Figures([timeline_of(titles)], "wide")
    for one, main, step in shown:
        yield Paragraph(_timeline_words(one, main, step))
    yield _categories([(one.path.resolve().name, main) for one, main, _ in shown])
    if len(run.profiles) > 1 and run.profiles[0].steps:
        yield _ranks(run.profiles)
    for one, main, _ in shown:
        yield _layers(one.path.resolve().name, main, one.predicted)


def _missing(run: Run) -> Notice:
    name = run.path.resolve().name
    if run.profiles and run.profiles[0].ended:
        why = f"{name}: no step was profiled before the run ended: {run.profiles[0].ended}."
    else:
        why = f"{name}: no step was profiled."
    return Notice(why, "hyperslab train RECIPE --resume --profile")


def _title(run: Run, main: Profile, step: StepTimes) -> str:
    grid = times(f"{axis} {n}" for axis, n in main.grid.items() if n > 1) or "one rank"
    return f"{run.path.resolve().name}: {grid}, {number(1e3 * step.seconds)} ms"


def _timeline_words(run: Run, main: Profile, step: StepTimes) -> str:
    few = "" if main.ended is None else f" (not {main.wanted}: {main.ended})"
    usual = main.usual_seconds
    slower = (
        ""
        if usual is None
        else f" Without the profiler a step took {number(1e3 * usual)} ms, the median before it."
    )
    return (
        f"{run.path.resolve().name}: step {step.step} of rank {main.rank}, the median of "
        f"{len(main.steps)}{few}. The rows cover {number(100 * step.covered)} % of it.{slower}"
    )


def _categories(runs: Sequence[tuple[str, Profile]]) -> Table:
    rows = []
    left = [1.0 for _ in runs]
    for category, kinds in CATEGORIES.items():
        cells = []
        for i, (_, profile) in enumerate(runs):
            whole = sum(step.seconds for step in profile.steps)
            spent = sum(step.rows.get(k, 0.0) for step in profile.steps for k in kinds)
            left[i] -= spent / whole
            cells += _share(spent / len(profile.steps), spent / whole)
        rows.append([category, *cells])
    rest = []
    for share, (_, profile) in zip(left, runs, strict=True):
        mean = sum(step.seconds for step in profile.steps) / len(profile.steps)
        rest += _share(max(share, 0.0) * mean, max(share, 0.0))
    rows.append(["not covered", *rest])
    head = ["", *(cell for name, _ in runs for cell in (f"{name} [ms]", "share"))]
    return Table("Time by category, the mean of the profiled steps of rank 0", head, rows)


def _share(seconds: float, share: float) -> list[TableCell | str]:
    return [number(1e3 * seconds), bar_cell(share, f"{100 * share:.1f} %")]


def _ranks(profiles: Sequence[Profile]) -> Paragraph:
    """Names the ranks that work longest and shortest; all wait for the slowest."""
    working = {
        p.rank: sum(s.rows[k] for s in p.steps for k in ("convolutions", "operators", "framework"))
        / len(p.steps)
        for p in profiles
        if p.steps
    }
    slowest = max(working, key=lambda rank: working[rank])
    fastest = min(working, key=lambda rank: working[rank])
    return Paragraph(
        f"Of {profiles[0].ranks} ranks, rank {slowest} works longest "
        f"({number(1e3 * working[slowest])} ms of a step), rank {fastest} shortest "
        f"({number(1e3 * working[fastest])} ms); who works shorter waits for the others."
    )


def _layers(name: str, main: Profile, predicted: Profile | None) -> Table:
    """Tables measured against predicted times, layer by layer."""
    measured = {(time.layer, time.stage): time for time in main.layers}
    expected = {} if predicted is None else {(t.layer, t.stage): t for t in predicted.layers}
    stages: tuple[Stage, ...] = ("forward", "backward", "optimizer")
    rows = [
        _layer(layer, stage, measured.get((layer, stage)), expected.get((layer, stage)), predicted)
        for layer in sorted(dict.fromkeys(layer for layer, _ in [*measured, *expected]), key=_last)
        for stage in stages
        if (layer, stage) in measured or (layer, stage) in expected
    ]
    whole = _layer_cells(_layers_sum(main.layers), _layers_sum(expected.values()), predicted)
    rows.append(["all", *whole])
    head = ["layer", "compute [ms]", "held up [ms]", "together [ms]"]
    head += [] if predicted is None else ["predicted [ms]", "measured / predicted"]
    return Table(f"{name}: time by layer and pass, on rank {main.rank}", head, rows)


def _last(layer: str) -> bool:
    """Orders what belongs to no layer after the layers."""
    return not layer


def _layers_sum(layers: Iterable[LayerTime]) -> LayerTime | None:
    """Sums up all layers and stages; None without any."""
    known = list(layers)
    if not known:
        return None
    compute = sum(time.compute for time in known)
    communication = sum(time.communication for time in known)
    return known[0].model_copy(update={"compute": compute, "communication": communication})


def _layer(
    layer: str,
    stage: Stage,
    measured: LayerTime | None,
    expected: LayerTime | None,
    predicted: Profile | None,
) -> list[TableCell | str]:
    name = TableCell(layer or "outside of layers", stage)
    return [name, *_layer_cells(measured, expected, predicted)]


def _layer_cells(
    measured: LayerTime | None, expected: LayerTime | None, predicted: Profile | None
) -> list[str]:
    cells = [DASH, DASH, DASH]
    if measured is not None:
        parts = (measured.compute, measured.communication, measured.seconds)
        cells = [number(1e3 * part) for part in parts]
    if predicted is not None:
        cells.append(DASH if expected is None else number(1e3 * expected.seconds))
        known = measured is not None and expected is not None and expected.seconds > 0
        ratio = measured.seconds / expected.seconds if known and measured and expected else None
        cells.append(number(ratio))
    return cells
