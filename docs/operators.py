"""Writes docs/operators.md, the table of operators, from the op table itself.

python docs/operators.py
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import get_overridable_functions

import hyperslab  # noqa: F401  (registers the rules)
from hyperslab.tensor.dispatch import RULES, Rule, op_name

PAGE = Path(__file__).with_suffix(".md")
TORCH = ".".join(torch.__version__.split(".")[:2])
SCHEME = "Distribution scheme"

HEAD = f"""\
<!-- Written by `python docs/operators.py`; a test compares it with the op table. -->
# Operators

This page lists what a network may call on cut tensors, of torch {TORCH}. **A rule gives the serial
result on any grid, or raises an error that says why not.** An operator without a rule raises
`hyperslab.UnsupportedOp`. No operator ever computes anything else. `torch.nn` modules call these
functions; methods of tensors and in-place forms (`relu_`) follow the rule of the function. A
*block* is the part of a tensor that one rank holds; *local* work needs no message.

You may differentiate gradients again (`create_graph=True`: gradient penalties, physics-informed
losses) through every rule except three. `F.grid_sample` and attention over cut tokens refuse it, as
in torch, and so does `hyperslab.scatter`; the error names the operator.

If a rule needs whole volumes, make them with `hyperslab.gather(x, axes)` or with
`parallelize(model, grid, until=...)`. `x.full()` returns the whole tensor as an ordinary one, and
`hyperslab.register` adds a rule.
"""

REFUSED = """\
## Refused: no rule

These functions of `torch.nn.functional` raise `hyperslab.UnsupportedOp`. Every function of `torch`,
`torch.linalg`, `torch.fft` and `torch.special`, and every method of a tensor, does the same if no
table above contains it.
"""


def name_of(function: Callable[..., Any]) -> str:
    """As users write it: F.relu, torch.sum, Tensor.view."""
    name = op_name(function)
    if "." not in name:
        return f"{function.__module__}.{name}"
    name = re.sub(r"\.__(get|set)__$", "", name)
    for long, short in (("torch.nn.functional.", "F."), ("torch.Tensor.", "Tensor.")):
        name = name.replace(long, short)
    return name.replace("torch.functional.", "torch.")


def merged(names: set[str]) -> list[str]:
    """One name for the forms of an operator: as a function, a method, in place."""
    forms = defaultdict(set)
    for name in names:
        space, leaf = name.rsplit(".", 1)
        forms[leaf if leaf.startswith("_") else leaf.rstrip("_")].add((space, leaf))
    order = {"F": 0, "torch": 1, "Tensor": 2}
    chosen = [
        ".".join(min(some, key=lambda form: (form[1].endswith("_"), order.get(form[0], 3), form)))
        for some in forms.values()
    ]
    return sorted(chosen, key=lambda name: ("._" in name, name.rsplit(".", 1)[1], name))


def scheme_of(doc: str) -> str:
    """The paragraph of a docstring that says how an operator is distributed, as one line."""
    paragraph = inspect.cleandoc(doc).split(SCHEME, 1)[1].split("\n\n")[0]
    return " ".join(paragraph.lstrip(":, ").split())


def modules_of(rules: list[Rule]) -> set[str]:
    """The modules of rules, and all of the families of ``hyperslab.ops`` that they belong to."""
    own = {getattr(rule.run, "__module__", None) or "" for rule in rules}
    families = {family_of(name) for name in own if name.startswith("hyperslab.ops.")}
    return {name for name in sys.modules if name in own or family_of(name) in families}


def family_of(module: str) -> str:
    """The family of ``hyperslab.ops``, a module or a package, in which a module is."""
    return ".".join(module.split(".")[:3])


def schemes(rules: list[Rule]) -> set[tuple[str, str]]:
    """What rules say about their messages: the name of the function or class, and its scheme."""
    found = set()
    for module in modules_of(rules):
        for value in vars(sys.modules[module]).values():
            own = getattr(value, "__module__", None) == module
            doc = value.__doc__ if own and callable(value) else None
            if isinstance(doc, str) and SCHEME in doc:
                found.add((value.__name__.lstrip("_"), scheme_of(doc)))
    return found


def table(family: str, functions: list[Callable[..., Any]]) -> str:
    rows = defaultdict(set)
    for function in functions:
        rows[RULES[function].doc].add(name_of(function))
    lines = [
        f"| {', '.join(f'`{name}`' for name in merged(names))} | {doc} |"
        for doc, names in sorted(rows.items(), key=lambda row: merged(row[1])[0])
    ]
    said = sorted(schemes([RULES[f] for f in functions]))
    notes = [f"\n*How `{name}` communicates:* {text}" for name, text in said]
    head = [f"## {family.capitalize()}\n", "| operators | rule |", "|---|---|"]
    return "\n".join([*head, *lines, *notes])


def without_rule() -> list[str]:
    functions = get_overridable_functions()[F]
    return merged({name_of(f) for f in functions if f not in RULES})


def page() -> str:
    """The whole page, as the op table is now."""
    families = defaultdict(list)
    for function, rule in RULES.items():
        if rule.family != "user":
            families[rule.family].append(function)
    tables = [table(family, families[family]) for family in sorted(families)]
    refused = ", ".join(f"`{name}`" for name in without_rule())
    return "\n\n".join([HEAD.rstrip(), *tables, REFUSED.rstrip(), refused]) + "\n"


if __name__ == "__main__":
    if PAGE.read_text() != page():  # tests may be reading it
        PAGE.write_text(page())
    print(f"wrote {PAGE}: {len(RULES)} functions with a rule")
