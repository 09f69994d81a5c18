"""Writes the chapter on what a step is made of: its timeline, its categories, its layers.

The figure shows what a rank did when, row by row (Oyama et al. 2020, figure 6).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib.patches import Patch

from hyperslab.studies.report.canvas import FIRST, LETTERS, MUTED, SECOND, THIRD, Canvas, Picture
from hyperslab.studies.report.html import Block, Chapter, Figures, Notice
from hyperslab.studies.run_folder import Run
from hyperslab.studies.table import DASH, Table, TableCell, TableRow, number, times
from hyperslab.train import profile as profiles

FIGURE_PIXELS = 1200  # pieces that lie closer than the figure's width over this are joined


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
    Stroke("halo", f"halos {profiles.UNDER_WAY}", SECOND, 0.35, 0.3),
    Stroke("halo", "halos", SECOND, 1.0, 0.8),
    Stroke("statistics", "statistics", SECOND, 1.0, 0.8),
    Stroke("gradients", f"gradients {profiles.UNDER_WAY}", SECOND, 0.35, 0.3),
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


def _timeline_of(steps: Sequence[tuple[str, profiles.StepTimes]]) -> Picture:
    """Draws steps one above the other on one scale, each with its title."""
    used = {s.line for s in STROKES for _, step in steps if step.spans.get(s.kind)}
    lines = [line for line in dict.fromkeys(s.line for s in STROKES) if line in used]
    tall = len(lines) + 1.2  # with its title
    canvas = Canvas("timeline", width=880, height=round(75 + 26 * tall * len(steps)))
    axes = canvas.axes
    longest = max(step.seconds for _, step in steps)
    ticks: list[tuple[str, float]] = []
    for place, (title, step) in enumerate(steps):
        top = -place * tall
        at = {line: top - 1 - i for i, line in enumerate(lines)}
        ticks += at.items()
        axes.text(0, top - 0.2, title, fontsize=LETTERS, fontweight="bold", va="center")
        for stroke in STROKES:
            if stroke.line in at:
                merged = merged_spans(step.spans.get(stroke.kind, ()), longest / FIGURE_PIXELS)
                pieces = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in merged]
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


def merged_spans(spans: Iterable[profiles.TimelineSpan], gap: float) -> list[tuple[float, float]]:
    """Joins spans that lie less than ``gap`` [s] apart: begins and ends."""
    result: list[tuple[float, float]] = []
    for begin, end, _ in sorted(spans):
        if result and begin - result[-1][1] < gap:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


CATEGORIES: dict[str, tuple[profiles.TimelineRow, ...]] = {
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
    shown: list[tuple[str, Run, profiles.Profile, profiles.StepTimes]] = []
    for one in [run, *([run.beside] if run.beside is not None else [])]:
        name = one.path.resolve().name
        main = one.profiles[0] if one.profiles else profiles.Profile()
        if main.median is not None:
            shown.append((name, one, main, main.median))
        else:
            why = f" before the run ended: {main.ended}" if main.ended else ""
            command = "hyperslab train RECIPE --resume --profile"
            yield Notice(f"{name}: no step was profiled{why}.", command)
    if not shown:
        return
    titles = []
    for name, _, main, step in shown:
        grid = times(f"{axis} {n}" for axis, n in main.grid.items() if n > 1) or "one rank"
        titles.append((f"{name}: {grid}, {number(1e3 * step.seconds)} ms", step))
    yield Figures([_timeline_of(titles)], "wide")
    for name, _, main, step in shown:
        yield _timeline_words(name, main, step)
    yield _categories([(name, main) for name, _, main, _ in shown])
    if len(run.profiles) > 1 and run.profiles[0].steps:
        yield _ranks(run.profiles)
    for name, one, main, _ in shown:
        yield _layers(name, main, one.predicted)


def _timeline_words(name: str, main: profiles.Profile, step: profiles.StepTimes) -> str:
    few = "" if main.ended is None else f" (not {main.wanted}: {main.ended})"
    words = (
        f"{name}: step {step.step} of rank {main.rank}, the median of {len(main.steps)}{few}. "
        f"The rows cover {number(100 * step.covered)} % of it."
    )
    if main.usual_seconds is None:
        return words
    usual = number(1e3 * main.usual_seconds)
    return f"{words} Without the profiler a step took {usual} ms, the median before it."


def _categories(runs: Sequence[tuple[str, profiles.Profile]]) -> Table:
    columns = []
    for _, profile in runs:
        whole = sum(step.seconds for step in profile.steps)
        shares = {
            category: sum(step.rows.get(k, 0.0) for step in profile.steps for k in kinds) / whole
            for category, kinds in CATEGORIES.items()
        }
        shares["not covered"] = max(1.0 - sum(shares.values()), 0.0)
        columns.append((whole / len(profile.steps), shares))
    rows: list[TableRow] = []
    for category in columns[0][1]:
        row: list[TableCell | str] = [category]
        for mean, shares in columns:
            share = shares[category]
            row += [number(1e3 * share * mean), TableCell(f"{100 * share:.1f} %", share=share)]
        rows.append(row)
    head = ["", *(cell for name, _ in runs for cell in (f"{name} [ms]", "share"))]
    return Table("Time by category, the mean of the profiled steps of rank 0", head, rows)


def _ranks(ranks: Sequence[profiles.Profile]) -> str:
    """Names the ranks that work longest and shortest; all wait for the slowest."""
    working = {
        p.rank: sum(s.rows[k] for s in p.steps for k in ("convolutions", "operators", "framework"))
        / len(p.steps)
        for p in ranks
        if p.steps
    }
    slowest = max(working, key=lambda rank: working[rank])
    fastest = min(working, key=lambda rank: working[rank])
    return (
        f"Of {ranks[0].ranks} ranks, rank {slowest} works longest "
        f"({number(1e3 * working[slowest])} ms of a step), rank {fastest} shortest "
        f"({number(1e3 * working[fastest])} ms); a rank that finishes earlier waits for the others."
    )


def _layers(name: str, main: profiles.Profile, predicted: profiles.Profile | None) -> Table:
    """Tables measured against predicted times, layer by layer."""
    measured = {(time.layer, time.stage): time for time in main.layers}
    expected = {} if predicted is None else {(t.layer, t.stage): t for t in predicted.layers}
    stages: tuple[profiles.Stage, ...] = ("forward", "backward", "optimizer")
    known = dict.fromkeys(layer for layer, _ in [*measured, *expected])
    rows: list[TableRow] = []
    for layer in sorted(known, key=lambda layer: not layer):  # what belongs to no layer comes last
        for stage in stages:
            key = (layer, stage)
            if key in measured or key in expected:
                title = TableCell(layer or "outside of layers", stage)
                cells = _layer_cells(measured.get(key), expected.get(key), predicted)
                rows.append([title, *cells])
    whole = _layer_cells(_layers_sum(main.layers), _layers_sum(expected.values()), predicted)
    rows.append(["all", *whole])
    head = ["layer", "compute [ms]", "held up [ms]", "together [ms]"]
    head += [] if predicted is None else ["predicted [ms]", "measured / predicted"]
    return Table(f"{name}: time by layer and pass, on rank {main.rank}", head, rows)


def _layers_sum(layers: Iterable[profiles.LayerTime]) -> profiles.LayerTime | None:
    """Sums up all layers and stages; None without any."""
    known = list(layers)
    if not known:
        return None
    compute = sum(time.compute for time in known)
    communication = sum(time.communication for time in known)
    return known[0].model_copy(update={"compute": compute, "communication": communication})


def _layer_cells(
    measured: profiles.LayerTime | None,
    expected: profiles.LayerTime | None,
    predicted: profiles.Profile | None,
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
