"""Private torch is reached from one module alone (tier: no process)."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hyperslab.util import torch_internals
from tests.structure import parsed

ROOT = Path(__file__).parent.parent / "src" / "hyperslab"
ALLOWED = ROOT / "util" / "torch_internals.py"

# Attributes of torch's objects, which no name of torch stands before.
OF_OBJECTS = {
    "_backward_hooks",
    "_cdata",
    "_execution_engine",
    "_get_backend",
    "_is_view",
    "_post_accumulate_grad_hooks",
    "_timeout",
    "_use_count",
    "_version",
}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(text: str) -> Iterator[str]:
    """What a module takes of private torch: imports, attributes, names in strings."""
    tree = parsed(text)
    of_torch = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "torch":
                    of_torch.add(name.asname or "torch")
                    if is_private(name.name):
                        yield name.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for name in node.names:
                of_torch.add(name.asname or name.name)
                if is_private(f"{node.module}.{name.name}"):
                    yield f"{node.module}.{name.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = node.value
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            named = isinstance(owner, ast.Name) and owner.id in of_torch
            if named or node.attr in OF_OBJECTS:
                yield ast.unparse(node)
        if isinstance(node, ast.Constant) and str(node.value).startswith("torch._"):
            yield str(node.value)


def test_no_other_module_reaches_into_private_torch() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(ROOT.rglob("*.py"))
        if path != ALLOWED
        for name in private_names(path.read_text())
    ]
    assert found == [], "give it a name and a reason in hyperslab/util/torch_internals.py"


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._C import DisableTorchFunctionSubclass",
        "from torch.utils._pytree import tree_map",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch; torch._C._current_graph_task_id()",
        "import torch.distributed as dist; dist.distributed_c10d._get_default_store()",
        "storage._cdata",
        "importlib.import_module('torch._dynamo')",
    ],
)
def test_an_access_is_seen(line: str) -> None:
    assert list(private_names(line))


def test_every_access_has_its_reason() -> None:
    """A docstring stands in every function and behind every alias, or behind a group of them."""
    body = ast.parse(inspect.getsource(torch_internals)).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef):
            assert ast.get_docstring(node), node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            follows = isinstance(after, ast.Assign) or (
                isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            )
            assert follows, ast.unparse(node)


def test_internals_do_what_they_are_taken_for() -> None:
    x = torch.ones(2, requires_grad=True)
    found: list[object] = []
    assert not torch_internals.backward_hooks(x)
    assert not torch_internals.accumulation_hooks(x)
    x.register_hook(lambda _: found.append(torch_internals.graph_task()))
    assert len(torch_internals.backward_hooks(x)) == 1
    x.register_post_accumulate_grad_hook(
        lambda _: torch_internals.at_end_of_backward(lambda: found.append("end"))
    )
    assert len(torch_internals.accumulation_hooks(x)) == 1
    x.sum().backward()
    assert torch_internals.graph_task() == -1
    assert isinstance(found[0], int)
    assert found[0] >= 0
    assert found[1:] == ["end"]

    assert torch_internals.dispatch_modes_active() == 0
    with torch_internals.fake_tensor_mode():
        assert torch_internals.dispatch_modes_active() == 1
        assert (torch.empty(2, 3) @ torch.empty(3, 4)).shape == (2, 4)

    one, other = torch.zeros(2), torch.ones(3)
    torch_internals.swap_tensor_impl(one, other)
    assert torch.equal(one, torch.ones(3))
    gradients = [torch.ones(2), torch.ones(3)]
    torch_internals.foreach_multiply_(gradients, 2.0)
    assert torch.equal(gradients[1], torch.full((3,), 2.0))

    norm = torch.nn.BatchNorm1d(2, affine=False)
    assert isinstance(norm, torch_internals.BatchNorm)
    names = [name for name, _ in torch_internals.own_tensors(norm)]
    assert names[:2] == ["weight", "bias"]
    assert torch_internals.onednn_enabled() == torch.backends.mkldnn.enabled
