"""What a JSON schema says of a value, in words and Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}


def referred(node: Mapping[str, Any]) -> list[str]:
    """The names of the definitions that a value may be of, in their order.

    >>> referred({"anyOf": [{"$ref": "#/$defs/Stop"}, {"type": "null"}]})
    ['Stop']
    """
    if "$ref" in node:
        return [node["$ref"].rpartition("/")[2]]
    several = [*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())]
    return [name for one in several for name in referred(one)]


def in_words(node: Mapping[str, Any], anchors: Mapping[str, str]) -> str:
    """What a value may be; ``anchors`` are those of definitions on the page.

    >>> in_words({"type": "integer", "exclusiveMinimum": 0}, {})
    '*integer* > 0'
    >>> in_words({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, {})
    '`a` or `b` or `null`'
    """
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name not in anchors:
            return f"*{name}*"
        return f"[`{anchors[name].rpartition('-')[2]}`](#{anchors[name]})"
    several = node.get("anyOf") or node.get("oneOf") or node.get("allOf")
    if several:
        return _either([in_words(one, anchors) for one in several])
    if "const" in node:
        return shown_value(node["const"])
    if "enum" in node:
        return _either([shown_value(value) for value in node["enum"]])
    return _plain(node, anchors)


def _either(words: list[str]) -> str:
    words = list(dict.fromkeys(words))
    if all(word.startswith("[") for word in words):
        return f"section: {', '.join(words)}"
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _plain(node: Mapping[str, Any], anchors: Mapping[str, str]) -> str:
    kind = node.get("type")
    if kind == "null":
        return "`null`"
    if kind == "array":
        return _list(node, anchors)
    if kind == "object":
        inside = node.get("additionalProperties")
        of = f" to {in_words(inside, anchors)}" if isinstance(inside, Mapping) else ""
        return f"*mapping*{of}"
    word = "path" if node.get("format") == "path" else TYPES.get(str(kind), "any value")
    bounds = [f"{sign} {node[key]:g}" for key, sign in BOUNDS.items() if key in node]
    return " ".join([f"*{word}*", ", ".join(bounds)]).strip()


def _list(node: Mapping[str, Any], anchors: Mapping[str, str]) -> str:
    if "prefixItems" in node:
        inside = [in_words(item, anchors) for item in node["prefixItems"]]
        if len(set(inside)) == 1:
            return f"*list of {len(inside)}*: {inside[0]}"
        return f"*list*: {'; '.join(inside)}"
    inside = in_words(node["items"], anchors) if node.get("items") else "*any value*"
    return f"*list of* {inside}"


def shown_value(value: Any) -> str:
    """A default as it is written in a recipe; a section's has a page of its own.

    >>> shown_value(None), shown_value("mse"), shown_value([1.0, 2]), shown_value({"a": 1})
    ('`null`', '`mse`', '`[1.0, 2]`', '')
    """
    if isinstance(value, dict):
        return "" if value else "`{}`"
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"
