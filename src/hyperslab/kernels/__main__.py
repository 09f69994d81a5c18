"""Prints which implementation runs in which case, and why: ``python -m hyperslab.kernels``."""

from __future__ import annotations

from hyperslab.kernels.registry import missing_instructions, table


def main() -> None:
    """Prints the table of `registry.RULES` and of all declared operators."""
    rows = [("operator", "case", "implementation", "file", "why"), *table()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    print("\nThe first case of an operator that holds is taken.")
    for missing in missing_instructions():
        print(f"Not on this machine: {missing}")


if __name__ == "__main__":
    main()
