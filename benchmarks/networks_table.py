"""The table of networks by processor in docs/benchmarks.md, from the newest records of each.

python benchmarks/networks_table.py     # writes it into the page
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- networks by processor -->\n", "<!-- end of networks -->"

RECORDS = {
    "EPYC, AVX-512 and bf16": (
        "five-epyc-2cores-2026-11-28",
        "others-epyc-2cores-2026-11-28",
        "segmenting-epyc-2cores-2026-11-29",
        "fno-cosmoflow-densenet-epyc-2cores-2026-11-29",
    ),
    "Xeon, AMX": (
        "xeon-amx-2cores-2026-11-30",
        "others-bf16-xeon-amx-2cores-2026-11-30",
        "filters-last-bf16-xeon-amx-2cores-2026-11-30",
        "swinunetr-unet-xeon-amx-2cores-2026-11-30",
        "seven-xeon-amx-2cores-2026-11-30",
    ),
    "EPYC, AVX2 alone": ("avx2-epyc-2cores-2026-12-01",),
}
"""Of every processor, oldest first: what a later one has replaces what an earlier one has."""

TYPES = ("float32", "bfloat16")

Steps = dict[tuple[str, str, str], dict[str, float]]
"""The ratio of steps by network, processor and type."""


def newest() -> Steps:
    """Read the records."""
    found: Steps = {}
    for processor, names in RECORDS.items():
        for name in names:
            content = json.loads((HERE / "results" / f"networks-{name}.json").read_text())
            for network, record in content.items():
                for dtype in TYPES:
                    if isinstance(record, dict) and "parts" in record.get(dtype, ()):
                        ratio = record[dtype]["parts"]["step"]["ratio"]
                        found[network, processor, dtype] = ratio
    return found


def table(found: Steps) -> str:
    """Write a row for each network, slowest first, and a column for each processor and type."""
    columns = [(p, t) for p in RECORDS for t in TYPES if any(key[1:] == (p, t) for key in found)]
    head = " | ".join(f"{processor}, {dtype}" for processor, dtype in columns)
    lines = [f"| network | {head} |", "|" + "---|" * (len(columns) + 1)]

    def slowest(network: str) -> float:
        return max(ratio["median"] for key, ratio in found.items() if key[0] == network)

    for network in sorted({key[0] for key in found}, key=slowest, reverse=True):
        cells = [_cell(found.get((network, *column))) for column in columns]
        lines.append(f"| {network} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(ratio: dict[str, float] | None) -> str:
    if ratio is None:
        return ""
    median = f"{ratio['median']:.2f}"
    bold = f"**{median}**" if ratio["median"] > 1 else median
    return f"{bold} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def page() -> str:
    """Return docs/benchmarks.md with the table of today's records."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table(newest()) + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page())
