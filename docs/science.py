"""Puts numbers into docs/science.md and others, from the files in benchmarks/results they name.

python docs/science.py [REPORT]

A block of a page begins with `<!-- FILE: WHAT ... -->` and ends with `<!-- end -->`. FILE is one
that `hyperslab report --json` or `benchmarks/plateau.py --json` wrote, WHAT one of the functions at
the end. Where there is no such file yet, the block says so. REPORT is the folder of pictures that
`hyperslab report --figures png` wrote of the runs of figures 9 and 10: the page's own pictures are
made of them. With it the figure of receptive-field.md is drawn, too, from its record.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


BLOCKS: dict[str, Callable[..., list[str]]] = {
    "errors": errors,
    "ratios": ratios,
    "bars": bars,
    "plateau": plateau,
    "windows": windows,
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
    for page in PAGES:
        text = page.read_text()
        new = filled(text, RESULTS)
        page.write_text(new)
        print(f"{page}: {'as it was' if new == text else 'written anew'}", file=sys.stderr)
