"""From a page's values to HTML, by the templates beside this file.

Everything is escaped by Jinja2, the SVG of our own figures excepted, and control characters are
written out: what stands in a run's files can neither run nor disturb how the page is read.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hyperslab.errors import printable
from hyperslab.report.page.blocks import Page


def render_page(page: Page) -> str:
    """The whole document."""
    return _environment().get_template("page.html").render(page=page)


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("hyperslab.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_control_characters,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _without_control_characters(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value
