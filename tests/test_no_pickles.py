"""Nothing that a file holds is unpickled or executed (tier: no process).

Every way in which Python and the libraries read pickles, or values that can name code, is looked
for in the source; where one stands, it is said here why no file gets there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure import SOURCE, parsed

MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "pickletools",
    "copyreg",
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "shelve",
    "multiprocessing",
    "torch.multiprocessing",
    "torch.package",
    "torch.distributed.checkpoint",
    "torch.distributed.rpc",
    "runpy",
}
"""Which unpickle what they are given, or run it."""

NAMES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "read_pickle",
    "unsafe_load",
    "unsafe_load_all",
    "full_load",
    "full_load_all",
    "UnsafeLoader",
    "FullLoader",
    "Unpickler",
    "allow_pickle",
    "weights_only",
    "load_state_dict_from_url",
    "recv",
    "eval",
    "exec",
    "ALLOW_UNSAFE_PICKLE_DECODE",
}
"""Of functions, arguments and classes that do."""

LOADERS = {"torch": {"load"}, "torch.jit": {"load"}, "jit": {"load"}, "yaml": {"load", "load_all"}}
"""Functions that do, unless they are told not to, by their modules."""

ALLOWED = {
    ("comm/agreement.py", "pickle"): "an exception of this process, to see if another one can",
    ("comm/agreement.py", "broadcast_object_list"): "from rank to rank, nothing of files",
    ("comm/agreement.py", "all_gather_object"): "from rank to rank, nothing of files",
    ("comm/shared_memory.py", "broadcast_object_list"): "from rank to rank",
    ("comm/watch.py", "recv"): "numbers of signals, one byte each, from this process",
    ("formats/arrays/open.py", "allow_pickle"): "False",
    (
        "launch/crew.py",
        "pickle",
    ): "between ranks of one user, each word signed with a key of his own",
    ("launch/forked.py", "runpy"): "the command of the launcher itself, in its ranks",
    ("util/documents.py", "yaml.load"): "with yaml's safe loader",
    ("util/torch_internals.py", "pickle"): "torch's own record of this process's NCCL operations",
    ("util/torch_internals.py", "recv"): "tensors, by torch's process group",
    ("util/worker_pool.py", "multiprocessing"): "between a process and those that it starts",
}
"""Why each is harmless."""


WORDS = re.compile(
    "|".join([*(name.rpartition(".")[2] for name in MODULES), *NAMES, r"load\b", "load_all"])
)
"""A module without any of them uses nothing of all that, and need not be parsed."""


def found_in(tree: ast.AST) -> Iterator[str]:
    """What a module uses of all that."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in _modules(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from _modules(node.module)
            for alias in node.names:
                yield from _modules(f"{node.module}.{alias.name}")
                if alias.name in NAMES:
                    yield alias.name
                if alias.name in LOADERS.get(node.module, ()):
                    yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            if node.attr in LOADERS.get(ast.unparse(node.value), ()):
                yield ast.unparse(node)
            if node.attr in NAMES - {"eval"}:  # a module's own
                yield node.attr
        elif (isinstance(node, ast.Name) and node.id in NAMES) or (
            isinstance(node, ast.keyword) and node.arg in NAMES
        ):
            yield node.id if isinstance(node, ast.Name) else str(node.arg)


def _modules(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from {".".join(parts[: i + 1]) for i in range(len(parts))} & MODULES


def test_the_source_unpickles_no_file() -> None:
    texts = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}
    found = {
        (name, use)
        for name, text in texts.items()
        if WORDS.search(text)
        for use in found_in(parsed(text))
    }
    assert found - ALLOWED.keys() == set()
    assert ALLOWED.keys() - found == set(), "not used any more"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint",
        "from multiprocessing.connection import Client",
        "from torch import load",
        "torch.load(path)",
        "torch.jit.load(path)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "connection.recv()",
        "dist.broadcast_object_list(values)",
        "eval(text)",
        "import joblib",
    ],
)
def test_the_test_finds(text: str) -> None:
    assert WORDS.search(text)
    assert [*found_in(ast.parse(text))]


@pytest.mark.parametrize("text", ["model.eval()", "json.load(file)", "np.load(path)", "x.load(y)"])
def test_the_test_lets_pass(text: str) -> None:
    assert not [*found_in(ast.parse(text))]


def test_numpy_unpickles_nothing_unless_asked(tmp_path: Path) -> None:
    """Since 1.16.3; the source relies on it."""
    import numpy as np

    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", a=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        np.load(tmp_path / "a.npy")
    with np.load(tmp_path / "a.npz") as file, pytest.raises(ValueError, match="allow_pickle"):
        file["a"]
