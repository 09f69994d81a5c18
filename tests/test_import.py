"""Importing hyperslab leaves torch and the process as they are (tier: child processes).

What changes them begins later: a command's streams and SIGINT in its entry point, glibc's
thresholds and the limit of open files at the first `Grid`, ``Function.apply`` at the first cut
tensor.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.selection import in_gate

STATE = """
import ctypes, gc, locale, logging, os, random, resource, signal, sys, threading, warnings
import rich.console  # as it is imported, it draws from Python's generator
import torch, torch.distributed

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]


def maps_large_blocks():
    # With glibc's own threshold a block of 64 MiB is a mapping of its own; freed, it is gone.
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = Mallinfo
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    before = libc.mallinfo2().hblkhd
    block = libc.malloc(ctypes.c_size_t(1 << 26))
    mapped = libc.mallinfo2().hblkhd - before
    libc.free(block)
    return mapped >= 1 << 26


def overrides():
    names = {}
    for owner in (torch.Tensor, torch.nn.Module, torch.autograd.Function, torch.nn.Parameter,
                  torch.autograd, torch.autograd.graph, torch.nn.functional, torch.distributed,
                  torch.utils.checkpoint, torch.cuda, torch):
        for name, value in vars(owner).items():
            if not isinstance(value, type(sys)):  # submodules come in by import
                names[f"{owner.__name__}.{name}"] = id(value)
    return names


def state():
    return {
        "torch": overrides(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch's generator": hash(bytes(torch.get_rng_state())),
        "Python's generator": hash(random.getstate()),
        "options": (
            torch.get_default_dtype(), torch.is_grad_enabled(), torch.backends.mkldnn.enabled,
            torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
        ),
        "groups": torch.distributed.is_initialized(),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "wakeup": signal.set_wakeup_fd(-1),
        "environment": dict(os.environ),
        "folder": (os.getcwd(), os.umask(0o22)),
        "descriptors": sorted(os.listdir("/proc/self/fd"))[:-1],
        "limits": [resource.getrlimit(n) for n in range(resource.RLIMIT_NOFILE + 1)],
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
        "running": [thread.name for thread in threading.enumerate()],
        "collector": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "logging": (logging.root.level, list(logging.root.handlers)),
        "locale": locale.setlocale(locale.LC_ALL),
        "switch": (sys.getswitchinterval(), sys.getrecursionlimit()),
        "allocator": maps_large_blocks(),
    }


def libraries():
    with open("/proc/self/maps") as lines:
        paths = {line.split()[-1] for line in lines}
    return {path for path in paths if ".so" in path}


os.umask(0o22)
before, loaded = state(), libraries()
"""

IMPORT = """
import hyperslab
{more}
after = state()
changed = [key for key in before if before[key] != after[key]]
for key in changed:
    if isinstance(before[key], dict):
        one, other = before[key], after[key]
        print(key, *(n for n in {{**one, **other}} if one.get(n) != other.get(n)))
    else:
        print(key, before[key], after[key])
"""

ALL_NAMES = "for name in hyperslab.__all__: getattr(hyperslab, name)"


def run(*words: str) -> str:
    line = [sys.executable, *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


# The compiled kernels are loaded, and built where they are not yet, when the first one runs.
LIBRARIES = """
ours = os.path.dirname(hyperslab.__file__)
torchs = os.path.dirname(torch.__file__)
extensions = {getattr(module, "__file__", None) for module in sys.modules.values()}
for path in libraries() - loaded:
    package = path.split("site-packages/")[-1].split("/")[0]
    vendored = package.endswith(".libs") or any(
        file and f"site-packages/{package}/" in file for file in extensions)
    if path.startswith(ours) or not (path in extensions or vendored):
        print(path)
"""


@pytest.mark.parametrize(
    "more", in_gate(["", ALL_NAMES], kept=[ALL_NAMES]), ids=["import", "all names"]
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_import_changes_nothing_and_loads_extensions_of_python_alone(more: str) -> None:
    program = STATE + IMPORT.format(more=more) + LIBRARIES
    assert run("-W", "ignore", "-c", program) == ""


APPLY = """
import gc, torch
import hyperslab as hs
from torch.autograd import Function
from torch._functorch import eager_transforms, vmap

PLACES = [(Function, "apply"), (vmap, "_add_batch_dim"), (eager_transforms, "_wrap_for_grad"),
          (eager_transforms, "_wrap_functional_tensor")]


def now():
    return [vars(owner)[name] for owner, name in PLACES]


before = now()
torchs = before[0]
grid = hs.Grid()
assert now() == before
x = hs.shard(torch.zeros(1, 1, 2, 2, 2), grid)
assert not set(now()) & set(before)
del x, grid
gc.collect()
assert now() == before

# Another library's wrapper stays, whether it came before ours or after.
calls = []


def count(original):
    def run(cls, *args):
        calls.append(cls)
        return original.__get__(None, cls)(*args)
    return classmethod(run)


Function.apply = first = count(torchs)
grid = hs.Grid()
x = hs.shard(torch.zeros(1, 1, 2, 2, 2), grid)
Function.apply = second = count(vars(Function)["apply"])
del x, grid
gc.collect()
assert vars(Function)["apply"] is second
grid = hs.Grid()
x = hs.shard(torch.zeros(1, 1, 2, 2, 2), grid)


class Twice(Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


calls.clear()  # those of the functions that cut
y = Twice.apply(torch.ones(2, requires_grad=True))
y.sum().backward()
assert len(calls) == 2
"""


@pytest.mark.usefixtures("forked")
def test_functions_are_wrapped_while_tensors_are_cut() -> None:
    run("-c", APPLY)
