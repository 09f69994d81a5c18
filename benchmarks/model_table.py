"""The table of `model.py`."""

from __future__ import annotations

import statistics
from typing import Any


def off(row: dict[str, Any], which: str) -> float:
    return row[which]["seconds"] / row["measured"] - 1


def worst_ratio(pairs: list[list[int]]) -> float:
    """The prediction over the count that is furthest from it, less 1."""
    return max((b / a - 1 for a, b in pairs), key=abs)


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'':32}{'measured':>10}{'repeats':>9}{'calibrated':>18}{'other shapes':>18}")
    print(f"{'case':18}{'grid':>14}{'[ms]':>10}{'':>9}{'[ms]':>10}{'off':>8}{'[ms]':>10}{'off':>8}"
          f"{'saved':>9}{'peak':>9}")  # fmt: skip
    for row in rows:
        grid = f"{row['ranks']} x {row['axis']}" if row["ranks"] > 1 else "1"
        print(
            f"{row['name']:18}{grid:>14}{1e3 * row['measured']:10.1f}"
            f"{100 * row['repeats']:8.1f}%"
            f"{1e3 * row['calibrated']['seconds']:10.1f}{100 * off(row, 'calibrated'):+7.1f}%"
            f"{1e3 * row['others']['seconds']:10.1f}{100 * off(row, 'others'):+7.1f}%"
            f"{100 * worst_ratio(row['saved']):+8.2f}%{100 * worst_ratio(row['peak']):+8.1f}%"
        )
    for name in ("calibrated", "others"):
        errors = [abs(off(row, name)) for row in rows]
        print(
            f"{name}: median {100 * statistics.median(errors):.1f} %, worst "
            f"{100 * max(errors):.1f} %"
        )
    between = [abs(row["others"]["seconds"] / row["calibrated"]["seconds"] - 1) for row in rows]
    print(
        f"others against calibrated: median {100 * statistics.median(between):.1f} %, worst "
        f"{100 * max(between):.1f} %"
    )
    repeats = [row["repeats"] for row in rows]
    print(f"a measurement repeats within: median {100 * statistics.median(repeats):.1f} %, worst "
          f"{100 * max(repeats):.1f} %")  # fmt: skip


def print_ranking(rows: list[dict[str, Any]]) -> None:
    axes = rows[0]["measured"] if rows else ()
    print(f"\n{'grids of two ranks, in turn':28}" + "".join(f"{axis:>20}" for axis in axes))
    for row in rows:
        both = (f"{1e3 * row['measured'][a]:9.1f} /{1e3 * row['predicted'][a]:7.1f}" for a in axes)
        print(
            f"{row['name']:28}"
            + "".join(f"{pair:>20}" for pair in both)
            + "   the plan's first is "
            f"{100 * row['behind']:.1f} % behind the fastest"
        )
