"""The parts of the page: small functions from values to HTML text.

Everything that comes from a run is escaped here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from hyperslab.report.figures.svg import Picture
from hyperslab.report.page.style import CSS

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The page loads nothing, and the browser is told so."""


@dataclass(frozen=True, slots=True)
class Chapter:
    """One chapter of the page; ``body`` is HTML."""

    key: str
    title: str
    body: str


def page(
    *,
    title: str,
    lede: str,
    tiles: str,
    chapters: Sequence[Chapter],
    made: str,
    kind: str = "report of a run",
) -> str:
    """The whole document."""
    links = "".join(f'<a href="#{s.key}">{escape(s.title)}</a>' for s in chapters)
    body = "\n".join(
        f'<section id="{s.key}"><h2>{escape(s.title)}</h2>\n{s.body}\n</section>' for s in chapters
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)} · hyperslab</title>
<style>{CSS}</style>
</head>
<body>
<header>
<p class="eyebrow">hyperslab · {escape(kind)}</p>
<h1>{escape(title)}</h1>
<p class="lede">{escape(lede)}</p>
{tiles}
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{body}
</main>
<footer>{escape(made)}</footer>
</body>
</html>
"""


def tiles(items: Iterable[tuple[str, str, str]]) -> str:
    """Large numbers: (what, value, remark)."""
    cells = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"
        for what, value, remark in items
    )
    return f'<dl class="tiles">{cells}</dl>' if cells else ""


def facts(items: Iterable[tuple[str, str]]) -> str:
    """A list of names and values."""
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in items)
    return f'<dl class="facts">{cells}</dl>'


def figures(pictures: Iterable[Picture], *, size: str = "large") -> str:
    """Figures side by side, as many as fit.

    ``size`` is "tiny", "small", "medium", "large" or "wide".
    """
    shown = "\n".join(
        f"<figure><h3>{escape(p.title)}</h3>{p.svg}<figcaption>{escape(p.caption)}</figcaption>"
        "</figure>"
        for p in pictures
    )
    return f'<div class="figures {size}">{shown}</div>'


def legend(items: Iterable[tuple[str, str]]) -> str:
    """Colours and what they mean."""
    cells = "".join(
        f'<li><span class="swatch" style="background: {colour}"></span>{escape(text)}</li>'
        for colour, text in items
    )
    return f'<ul class="legend">{cells}</ul>'


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    """A heading inside a section."""
    return f'<h3 class="part">{escape(text)}</h3>'


def row_name(name: str, remark: str) -> str:
    """A name with a quiet remark, for the first cell of a row."""
    return escape(name) + (f" <small>{escape(remark)}</small>" if remark else "")


def missing(text: str, command: str = "") -> str:
    """Something is missing; ``command`` makes it."""
    code = f"<pre><code>{escape(command)}</code></pre>" if command else ""
    return f'<div class="notice" role="note"><p>{escape(text)}</p>{code}</div>'


def bar(share: float, text: str) -> str:
    """A number in a cell with a bar behind it; ``share`` of 1 fills the cell."""
    width = 100 * min(max(share, 0.0), 1.0)
    return f'<span class="bar" style="--share: {width:.1f}%">{escape(text)}</span>'


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column names the row; cells are HTML already."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "\n".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def details(summary: str, text: str) -> str:
    """Text that opens on demand."""
    return (
        f"<details><summary>{escape(summary)}</summary>"
        f"<pre><code>{escape(text)}</code></pre></details>"
    )
