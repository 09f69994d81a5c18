"""docs/operators.md is what the op table says now (tier: no process)."""

from __future__ import annotations

import difflib
import re
import runpy
from pathlib import Path

import pytest
import torch

import hyperslab as hs
from hyperslab.tensor.dispatch import RULES, Rule

ROOT = Path(__file__).parent.parent
WRITER = runpy.run_path(str(ROOT / "docs" / "operators.py"))
TORCH = WRITER["TORCH"]


def test_the_page_is_what_the_op_table_says() -> None:
    page = (ROOT / "docs" / "operators.md").read_text()
    if f"of torch {TORCH}." not in page:
        pytest.skip(f"the page is of another torch than {torch.__version__}")
    now = WRITER["page"]()
    changes = difflib.unified_diff(page.splitlines(), now.splitlines(), "page", "op table", n=0)
    assert page == now, "\n".join(["docs/operators.md: run python docs/operators.py", *changes])


def test_every_rule_says_what_it_does() -> None:
    for function, rule in RULES.items():
        assert rule.doc, f"the rule of {function} has no docstring"
        assert "|" not in rule.doc, f"{function}: a bar would end the column of the table"


def test_the_page_names_every_rule_and_every_refusal() -> None:
    page = WRITER["page"]()
    tables, refused = page.split("## Refused")
    for function, rule in RULES.items():
        if rule.family != "user":
            (name,) = WRITER["merged"]({WRITER["name_of"](function)})
            leaf = name.rsplit(".", 1)[1].rstrip("_")
            assert re.search(rf"\.{re.escape(leaf)}_*`", tables), name
    assert "`F.ctc_loss`" in refused
    assert "`F.conv3d`" not in refused


def test_every_rule_is_listed_under_its_room() -> None:
    for function, rule in RULES.items():
        module = getattr(rule.run, "__module__", None) or ""
        if module.startswith("hyperslab.ops."):
            assert rule.family == module.split(".")[2], f"{function} stands in {module}"


def test_a_users_own_rule_is_not_in_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    page = WRITER["page"]()
    monkeypatch.setitem(RULES, torch.heaviside, Rule(lambda x: x, "user", "Mine."))
    assert WRITER["page"]() == page
    monkeypatch.setitem(RULES, torch.heaviside, Rule(lambda x: x, "pointwise", "Ours."))
    assert "| `torch.heaviside` | Ours. |" in WRITER["page"]()


def test_a_row_merges_the_forms_of_an_operator() -> None:
    names = {"torch.abs", "Tensor.abs", "Tensor.abs_", "Tensor.fill_", "F.relu", "Tensor.__add__"}
    expected = ["torch.abs", "Tensor.fill_", "F.relu", "Tensor.__add__"]
    assert WRITER["merged"](names) == expected


def test_the_refused_are_refused() -> None:
    x = hs.shard(torch.zeros(2, 3, 4), hs.Grid())
    for name in WRITER["without_rule"]():
        function = getattr(torch.nn.functional, name.removeprefix("F."))
        with pytest.raises(hs.UnsupportedOp):
            hs.Sharded.__torch_function__(function, (hs.Sharded,), (x,))
