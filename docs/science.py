"""Puts numbers into docs/science.md and others, from the files in benchmarks/results they name.

python docs/science.py [REPORT]

A block of a page begins with `<!-- FILE: WHAT ... -->` and ends with `<!-- end -->`. FILE is one
that `hyperslab report --json` or `benchmarks/plateau.py --json` wrote, WHAT one of the functions at
the end. Where there is no such file yet, the block says so. REPORT is the folder of pictures that
`hyperslab report --figures png` wrote of the runs of figures 9 and 10: the page's own pictures are
made of them. With it the figures of `benchmarks/head.py` and receptive-field.md are drawn, too.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyperslab.studies.table import duration

PAGES = tuple(
    Path(__file__).with_name(name) for name in ("science.md", "sc18.md", "receptive-field.md")
)
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
IMAGES = Path(__file__).with_name("images")
PICTURES = {
    "science-figure9.png": ("figure-9-epoch.png",),
    "science-figure10.png": ("figure-10-residuals-0.png", "figure-10-residuals-1.png"),
}
"""The pictures of the page, and those of a report that stand in them, one below the other."""

BLOCK = re.compile(r"(<!-- ([\w.+-]+\.json): ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
BARS = {"mean": 1.5, "Omega_m": 3.0, "sigma_8": 2.0}
"""The least lower ends of the intervals of parts against the whole."""

GOALS = {"Omega_m": (0.9, 1.0), "sigma_8": (0.9, 1.0), "n_s": (1.0, None), "H_0": (1.0, None)}
"""The most of the ridge's error that a network may have, and what its interval must stay below."""

OF_MEAN = 0.8
"""The most of the error of predicting the mean."""

OF_RIDGE = 1.5
"""The largest ratio of a whole network's error to that of the ridge."""


def filled(page: str, results: Path) -> str:
    """The page with every block written anew."""
    return BLOCK.sub(lambda block: _block(block, results), page)


def _block(block: re.Match[str], results: Path) -> str:
    head, file, words, end = block.groups()
    path = results / file
    if not path.exists():
        return f"{head}Not measured yet.\n{end}"
    what, *arguments = (part.strip() for part in words.split(","))
    lines = BLOCKS[what](json.loads(path.read_text()), *arguments)
    return "\n".join([head + lines[0], *lines[1:], end])


def errors(numbers: dict[str, Any]) -> list[str]:
    """Errors over those of predicting the mean: median over seeds, interval."""
    keys = ["mean", *numbers["parameters"]]
    lines = _head(["configuration", "seeds", *keys])
    for row in numbers["rows"]:
        medians = [statistics.median(row["ratio_by_seed"][key]) for key in keys]
        cells = [_cell(m, row["ratio"][key]) for m, key in zip(medians, keys, strict=True)]
        seeds = "control" if row["control"] else str(row["seeds"])
        lines.append(_line([row["name"], seeds, *cells]))
    return [*lines, _line(["predicting the mean", "control", *["1"] * len(keys)])]


def ratios(numbers: dict[str, Any]) -> list[str]:
    """Errors over that of the best network that sees whole volumes, with intervals."""
    keys = ["mean", *numbers["parameters"]]
    lines = _head([f"error over that of {numbers['reference']}", *keys])
    for row in numbers["rows"]:
        found = row["to_reference"]
        if found["mean"] is not None:
            lines.append(_line([row["name"], *(_cell(found[k]["value"], found[k]) for k in keys)]))
    return lines


def bars(numbers: dict[str, Any], parts: str, ridge: str) -> list[str]:
    """Whether the parts are as much worse, and the whole as good, as they were expected to be."""
    rows = {row["name"]: row["to_reference"] for row in numbers["rows"]}
    lines = _head(["bar", "found", ""])
    for key, least in BARS.items():
        found = rows[parts][key]
        words = f"{parts} over {numbers['reference']}, {key}: lower end above {least:g}"
        lines.append(_line([words, _cell(found["value"], found), _met(found["lower"] > least)]))
    for key in ("Omega_m", "sigma_8"):
        found = 1 / rows[ridge][key]["value"]
        words = f"{numbers['reference']} over {ridge}, {key}: at most {OF_RIDGE:g}"
        lines.append(_line([words, f"{found:.3g}", _met(found <= OF_RIDGE)]))
    return lines


def plateau(numbers: dict[str, Any]) -> list[str]:
    """What of a layer's outputs is the same for all samples, and its gradient: of convolutions and
    dense layers.
    """
    steps = numbers["steps"]
    lines = _head(["layer", "at the start", f"after {steps} steps", "gradient"])
    for row in numbers["rows"]:
        if row["gradient"] is not None and "norm" not in row["layer"]:
            name = row["layer"].rsplit(".", 1)[-1]
            shares = [f"{100 * row[key]:.1f} %" for key in ("common", "common_after")]
            lines.append(_line([name, *shares, f"{row['gradient']:.1e}"]))
    return lines


def windows(numbers: dict[str, Any], voxel: str) -> list[str]:
    """Errors by the receptive field of the network, which names the rows; ``voxel``: in Mpc/h."""
    keys = ["mean", *numbers["parameters"]]
    lines = _head(["receptive field [voxels]", "[Mpc/h]", "weights", "seeds", *keys])
    for row in numbers["rows"]:
        cells = [_cell(row["ratio"][key]["value"], row["ratio"][key]) for key in keys]
        facts = [row["name"], f"{int(row['name']) * float(voxel):g}", f"{row['weights']:,}"]
        lines.append(_line([*facts, str(row["seeds"]), *cells]))
    return lines


def learning(numbers: dict[str, Any], split: str = "test") -> list[str]:
    """Errors by the number of training universes, of network and ridge, and their ratios."""
    keys = [*numbers["rows"][0][split]["ridge over mean"]]
    lines = _head(["universes", "error", *keys])
    for row in numbers["rows"]:
        for what, found in row[split].items():
            cells = [_cell(found[key]["value"], found[key]) for key in keys]
            lines.append(_line([f"{row['universes']:,}", what, *cells]))
    return lines


def goals(numbers: dict[str, Any]) -> list[str]:
    """Whether the network of the most universes is as good as it was to be.

    Beside each ratio to the ridge is that to the best ridge which is known.
    """
    found = numbers["rows"][-1]["test"]
    lines = _head(["bar", "found", "", "over the best ridge"])
    for key, (most, least_sure) in GOALS.items():
        one = found["network over ridge"][key]
        words = f"over ridge, {key}: at most {most:g}"
        holds = one["value"] <= most
        if least_sure is not None:
            words += f", upper end below {least_sure:g}"
            holds = holds and one["upper"] < least_sure
        best = found["network over best ridge"][key]
        cells = [_cell(one["value"], one), _met(holds), _cell(best["value"], best)]
        lines.append(_line([words, *cells]))
    for key in GOALS:
        one = found["network over mean"][key]
        words = f"over predicting the mean, {key}: below {OF_MEAN:g}"
        lines.append(_line([words, _cell(one["value"], one), _met(one["value"] < OF_MEAN), ""]))
    return lines


def levers(numbers: dict[str, Any]) -> list[str]:
    """Ratios to the ridge with one choice changed at a time; of validation their plain mean."""
    keys = [key for key in numbers["levers"][0]["test"]["network over ridge"] if key != "mean"]
    lines = _head(["changed alone", "validation, mean of four", *(f"{key}, test" for key in keys)])
    for row in numbers["levers"]:
        seen, found = (row[split]["network over ridge"] for split in ("validation", "test"))
        mean = statistics.mean(seen[key]["value"] for key in keys)
        cells = [_cell(found[key]["value"], found[key]) for key in keys]
        lines.append(_line([row["name"], f"{mean:.3f}", *cells]))
    return lines


def coverage(numbers: dict[str, Any]) -> list[str]:
    """How often intervals of 68 and 95 % hold the true value of a test universe."""
    found = numbers["coverage"]
    keys = [*found["factor"], "together"]
    lines = _head(["intervals of", "level", *keys])
    for name in ("ridge", "network, as it says", "network"):
        rows = {**found[name]["parameters"], "together": found[name]["joint"]}
        for level in (68, 95):
            cells = [_share(rows[key], f"coverage_{level}") for key in keys]
            lines.append(_line([name, f"{level} %", *cells]))
    return lines


def rates(numbers: dict[str, Any]) -> list[str]:
    """How each configuration was trained, and the best of the rates that were tried."""
    head = ["configuration", "training samples", "mini-batch", "steps", "rates tried", "best"]
    lines = _head(head)
    for one in numbers["configurations"]:
        tried = [found["rate"] for found in one["rates"]]
        span = f"{len(tried)}, {min(tried):.1e} to {max(tried):.1e}"
        best = f"{one['rate']:.1e}" + ("" if one["inside"] else ", **at the end**")
        facts = [f"{one[key]:,}" for key in ("samples", "batch", "steps")]
        lines.append(_line([one["name"], *facts, span, best]))
    return lines


def parts(numbers: dict[str, Any], *others: str) -> list[str]:
    """Errors of parts over those of whole volumes, by the same method.

    ``others``: names of methods and files that `hyperslab report --json` wrote, in turns.
    """
    keys = ["mean", *numbers["parameters"]]
    lines = _head(["error over that of whole universes", *keys])
    found = [(row["name"], row["to_reference"]) for row in numbers["rows"]]
    for method, file in zip(others[::2], others[1::2], strict=True):
        rows = json.loads((RESULTS / file).read_text())["rows"]
        found += [(f"{method}: {r['name']}", r["to_reference"]) for r in rows if not r["control"]]
    for name, to_whole in found:
        if to_whole["mean"] is not None:
            lines.append(_line([name, *(_cell(to_whole[k]["value"], to_whole[k]) for k in keys)]))
    return lines


def posterior(numbers: dict[str, Any]) -> list[str]:
    """How often intervals of a flow's posteriors hold the true value, and a test of all ranks."""
    lines = []
    for name in ("ridge", "network"):
        found = numbers["summaries"][name]["test"]
        rows = {**found["parameters"], "together": found["joint"]}
        if not lines:
            lines = _head(["posterior from", "of true values", *rows])
        for level in (68, 95):
            cells = [_share(row, f"coverage_{level}") for row in rows.values()]
            lines.append(_line([name, f"in intervals of {level} %", *cells]))
        for one in numbers["seeds"]:
            cells = [f"{one[name][key]:.2f}" for key in rows]
            what = f"probability of ranks so uneven, seed {one['seed']}"
            lines.append(_line([name, what, *cells]))
    return lines


def budget(numbers: dict[str, Any]) -> list[str]:
    """How long the pieces of a record were to take, and took."""
    lines = _head(["pieces", "made and timed", "not foreseen", "expected", "taken"])
    rows = {kind: row for kind, row in numbers["budget"].items() if row["timed"]}
    whole = {key: sum(row[key] for row in rows.values()) for key in (*COUNTS, *SECONDS)}
    for kind, row in {**rows, "all": whole}.items():
        counts = [str(row[key]) for key in COUNTS]
        lines.append(_line([kind, *counts, *(duration(row[key]) for key in SECONDS)]))
    return lines


COUNTS = ("timed", "unforeseen")
SECONDS = ("expected_s", "taken_s")

BLOCKS: dict[str, Callable[..., list[str]]] = {
    "errors": errors,
    "ratios": ratios,
    "bars": bars,
    "budget": budget,
    "plateau": plateau,
    "windows": windows,
    "learning": learning,
    "goals": goals,
    "levers": levers,
    "coverage": coverage,
    "rates": rates,
    "parts": parts,
    "posterior": posterior,
}


def make_pictures(report: Path, images: Path) -> None:
    """Put pictures of a report together for the page."""
    from PIL import Image

    for name, parts in PICTURES.items():
        found = [Image.open(report / part).convert("RGB") for part in parts]
        height = sum(one.height for one in found)
        page = Image.new("RGB", (max(one.width for one in found), height), "white")
        top = 0
        for one in found:
            page.paste(one, (page.width - one.width, top))
            top += one.height
        page.quantize(64).save(images / name, optimize=True)


def draw_windows(record: Path, image: Path) -> None:
    """Draw the errors of networks against their receptive field."""
    from matplotlib.figure import Figure

    numbers = json.loads(record.read_text())
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for place, key in enumerate(numbers["parameters"]):
        found = [row["ratio"][key] for row in numbers["rows"]]
        values = [one["value"] for one in found]
        below = [one["value"] - one["lower"] for one in found]
        above = [one["upper"] - one["value"] for one in found]
        # side by side, so that no interval hides another
        width = [int(row["name"]) * 1.03 ** (place - 1.5) for row in numbers["rows"]]
        axes.errorbar(width, values, (below, above), label=key, marker="o", capsize=2)
    ticks = [int(row["name"]) for row in numbers["rows"]]
    axes.axhline(1, color="grey", linestyle=":", label="predicting the mean")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.set_xlabel("receptive field [voxels along each side]")
    axes.set_ylabel("error over that of predicting the mean")
    figure.legend(loc="outside upper center", ncols=5, fontsize="small")
    figure.savefig(image, dpi=150)


def draw_learning(record: Path, image: Path) -> None:
    """Draw the errors of network and ridge against the number of training universes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    rows = json.loads(record.read_text())["rows"]
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    sizes = [row["universes"] for row in rows]
    keys = [key for key in rows[0]["test"]["ridge over mean"] if key != "mean"]
    for axes, key in zip(figure.subplots(2, 2, sharex=True).flat, keys, strict=True):
        for place, (what, colour) in enumerate((("ridge", "C1"), ("network", "C0"))):
            found = [row["test"][f"{what} over mean"][key] for row in rows]
            values = [one["value"] for one in found]
            below = [one["value"] - one["lower"] for one in found]
            above = [one["upper"] - one["value"] for one in found]
            # side by side, so that no interval hides another
            beside = [size * 1.06 ** (place - 0.5) for size in sizes]
            axes.errorbar(
                beside, values, (below, above), label=what, marker="o", capsize=2, color=colour
            )
        axes.set_title(key)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 7)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
    figure.supxlabel("universes to train on")
    figure.supylabel("error over that of predicting the mean")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figure.savefig(image, dpi=150)


def draw_coverage(record: Path, image: Path) -> None:
    """Draw how often intervals of every level hold the true value, for network and ridge.

    The record is that of `benchmarks/head.py` or of `benchmarks/posterior.py`.
    """
    from matplotlib.figure import Figure

    numbers = json.loads(record.read_text())
    if "summaries" in numbers:
        found = {name: one["test"] for name, one in numbers["summaries"].items()}
        levels = numbers["levels"]
    else:
        found = numbers["coverage"]
        levels = found["levels"]
    tests = numbers["splits"]["test"]
    reach = [1.96 * (level * (1 - level) / tests) ** 0.5 for level in levels]
    figure = Figure(figsize=(8, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2, sharey=True), ("network", "ridge"), strict=True):
        below, above = ([sign * one for one in reach] for sign in (-1, 1))
        axes.fill_between(levels, below, above, color="0.88", label="95 % of calibrated ones")
        for key, shares in found[name]["drawn"].items():
            off = [share - level for share, level in zip(shares, levels, strict=True)]
            axes.plot(levels, off, marker=".", label=key)
        axes.axhline(0, color="grey", linestyle=":")
        axes.set_title(name)
        axes.set_xlabel("level of the interval")
    figure.axes[0].set_ylabel("share of true values inside, less the level")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=6, fontsize="small")
    figure.savefig(image, dpi=150)


DRAWN_PARTS = {
    "network, one sub-volume": ("", "", "C0", "-", "o"),
    "network, averaged and recalibrated": ("", ", averaged and recalibrated", "C0", "--", "s"),
    "network, statistics averaged": ("statistics of ", ", averaged", "C2", "-.", "^"),
    "ridge, one sub-volume": ("ridge, ", "", "C1", "-", "o"),
    "ridge, averaged and recalibrated": ("ridge, ", ", averaged and recalibrated", "C1", "--", "s"),
}
"""Lines of a figure: before and behind the width in a row's name, colour, dashes and marker."""


def draw_parts(record: Path, image: Path) -> None:
    """Draw the errors of networks and ridge against the part of a universe that they see."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    numbers = json.loads(record.read_text())
    rows = {row["name"]: row for row in numbers["rows"]}
    widths = sorted({row["width"] for row in rows.values()})
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True).flat
    for axes, key in zip(panels, numbers["parameters"], strict=True):
        for place, (label, (before, behind, *style)) in enumerate(DRAWN_PARTS.items()):
            method = "ridge, " if before == "ridge, " else ""
            # all methods see the same where they see the whole
            names = [f"{before}{width}{behind}" for width in widths[:-1]]
            found = [rows[name]["ratio"][key] for name in (*names, f"{method}{widths[-1]}")]
            values = [one["value"] for one in found]
            below = [one["value"] - one["lower"] for one in found]
            above = [one["upper"] - one["value"] for one in found]
            # side by side, so that no interval hides another
            beside = [(width / widths[-1]) ** 3 * 1.09 ** (place - 2) for width in widths]
            colour, dashes, marker = style
            axes.errorbar(
                beside,
                values,
                (below, above),
                label=label,
                color=colour,
                linestyle=dashes,
                marker=marker,
                markersize=4,
                capsize=2,
            )
        axes.set_title(key)
        axes.set_xscale("log", base=2)
        shares = [(width / widths[-1]) ** 3 for width in widths]
        axes.set_xticks(shares, ["1" if one == 1 else f"1/{1 / one:.0f}" for one in shares])
        axes.minorticks_off()
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        ticks = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 6, 7, 8)
        axes.yaxis.set_major_locator(LogLocator(subs=ticks))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
    figure.supxlabel("share of a universe that is seen at once")
    figure.supylabel("error over that of predicting the mean")
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize="small"
    )
    figure.savefig(image, dpi=150)


def draw_residuals(record: Path, image: Path) -> None:
    """Draw the distributions of residuals, a panel for each parameter; of the ridge its whole."""
    from matplotlib.figure import Figure

    numbers = json.loads(record.read_text())
    rows = [
        row
        for row in numbers["rows"]
        if "equal samples" not in row["name"]
        and (not row["control"] or row["to_reference"]["mean"] is None)
    ]
    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True).flat
    for place, (axes, key) in enumerate(zip(panels, numbers["parameters"], strict=True)):
        boxes = [
            dict(zip(("whislo", "q1", "med", "q3", "whishi"), row["residuals"][key], strict=True))
            for row in rows
        ]
        axes.bxp(
            [{**box, "label": row["name"]} for box, row in zip(boxes, rows, strict=True)],
            orientation="horizontal",
            widths=0.6,
            manage_ticks=place == 0,  # all share them
            showfliers=False,
            boxprops={"color": "C0"},
            whiskerprops={"color": "C0"},
            capprops={"color": "C0"},
            medianprops={"color": "C1", "linewidth": 2},
        )
        axes.axvline(0, color="0.3", linewidth=0.8)
        axes.set_title(key)
    figure.axes[0].invert_yaxis()
    figure.supxlabel("predicted - true, in units in which parameters range from -1 to 1")
    figure.savefig(image, dpi=150)


def _share(row: dict[str, Any], key: str) -> str:
    low, high = (100 * end for end in row[f"{key}_interval"])
    return f"{100 * row[key]:.0f} % ({low:.0f} to {high:.0f})"


def _met(holds: bool) -> str:
    return "met" if holds else "**missed**"


def _cell(value: float, interval: dict[str, float]) -> str:
    return f"{value:.3g} ({interval['lower']:.3g} to {interval['upper']:.3g})"


def _head(cells: list[str]) -> list[str]:
    return [_line(cells), _line(["---"] * len(cells))]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        make_pictures(Path(sys.argv[1]), IMAGES)
        draw_windows(RESULTS / "receptive-field-32.json", IMAGES / "receptive-field.png")
        draw_learning(RESULTS / "science-head.json", IMAGES / "science-learning.png")
        draw_coverage(RESULTS / "science-head.json", IMAGES / "science-coverage.png")
        draw_parts(RESULTS / "science-subvolumes.json", IMAGES / "science-subvolumes.png")
        draw_residuals(RESULTS / "science-subvolumes.json", IMAGES / "science-residuals.png")
        draw_coverage(RESULTS / "science-posterior.json", IMAGES / "science-posterior.png")
    for page in PAGES:
        text = page.read_text()
        new = filled(text, RESULTS)
        page.write_text(new)
        print(f"{page}: {'as it was' if new == text else 'written anew'}", file=sys.stderr)
