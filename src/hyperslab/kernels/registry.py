"""Declares the operators to torch, and alone chooses which implementation of each one runs.

The choice is a rule from device, instruction set, dtype, shapes and memory format: the same in
every run and on every machine, but for what its instruction set lacks. `RULES` is that rule, as a
table of cases from which the first that holds is taken::

    python -m hyperslab.kernels    prints it

Its thresholds come from ``benchmarks/kernel_rule.py``, which times every implementation and shows
where the rule takes a slower one. `force` has tests run the others.

An operator is declared in its own module, once, as a `KernelOperator`: its plain reference, whose
signature is its schema, and its versions for CPU and CUDA. They are plain functions of the
dispatcher, without the checks that `torch.library.custom_op` makes at every call.

[Note: Triton as a guest] Triton compiles a launcher in C against Python's headers, and keeps what
it compiles in a folder; a machine may lack any of these. So the first `hyperslab.Grid` on a CUDA
device tries it once, and where it fails on any rank the references run on all of them.

In reading order: declarations; Triton as a guest; what the choice depends on; the rules; the
choice; the table.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import socket
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from inspect import signature
from typing import Any, NamedTuple

import torch

from hyperslab.errors import reason
from hyperslab.kernels.compile import (
    TYPE_CODES,
    Library,
    depthwise_is_known,
    direct_is_known,
    library,
    winograd_is_known,
)
from hyperslab.kernels.conv_problem import HEAVY_WEIGHT, PROBLEMS, Kernels, Problem, Task
from hyperslab.kernels.conv_variants import CONV_VARIANTS, is_depthwise, overruns, takes_im2col
from hyperslab.kernels.memory_format import CHANNELS_LAST, MOST_TAPS
from hyperslab.util.private_folders import make_private, user_folder
from hyperslab.util.torch_internals import (
    dispatch_modes_active,
    function_modes_active,
    onednn_enabled,
    onednn_has_bfloat16,
    processor_has_matrix_tiles,
    profiler_runs,
)

_SCHEMA_TYPES = {
    "torch.Tensor": "Tensor",
    "torch.Tensor | None": "Tensor?",
    "Sequence[torch.Tensor]": "Tensor[]",
    "Sequence[int]": "int[]",
    "torch.dtype": "ScalarType",
    "tuple[torch.Tensor, torch.Tensor]": "(Tensor, Tensor)",
    "tuple[torch.Tensor, torch.Tensor, torch.Tensor]": "(Tensor, Tensor, Tensor)",
    "None": "()",
}


Operands = Any
"""The arguments of an operator, by the names that its reference gives them: a named tuple."""


@dataclass(frozen=True)
class KernelOperator:
    """Declares one operator by its implementations; the ``reference`` has its name and signature.

    ``cpu`` takes the `Library` and the `Operands`, calls C, and returns `NotImplemented` for
    those that the C code does not take; ``cuda`` names the module of a Triton version, which takes
    the operands and is imported at its first call. The reference runs everywhere else. On the meta
    device it gives shapes and strides, too; ``meta`` does where the reference reads values.
    """

    reference: Callable[..., Any]
    cpu: Callable[[Library, Operands], Any] | None = None
    source: str = ""  # of `cpu`, in csrc
    cuda: str | None = None  # module in `hyperslab.kernels.cuda` that has triton_NAME
    meta: Callable[..., Any] | None = None
    writes: tuple[str, ...] = ()  # the arguments that are changed
    doubles: bool = False  # the Triton version takes numbers of float64, too
    beside: tuple[torch.dtype, ...] = ()  # further types that it takes behind the first operand

    @cached_property
    def name(self) -> str:
        return self.reference.__name__

    @cached_property
    def operands(self) -> Any:
        return namedtuple(self.name, signature(self.reference).parameters)

    @property
    def schema(self) -> str:
        """Returns the schema for torch: the reference's signature, which is kept as text."""
        told = self.reference.__annotations__
        kinds = {name: _SCHEMA_TYPES.get(kind, kind) for name, kind in told.items()}
        result = kinds.pop("return")
        kinds |= {name: f"Tensor({mark}!)" for name, mark in zip(self.writes, "ab", strict=False)}
        arguments = ", ".join(f"{kind} {name}" for name, kind in kinds.items())
        return f"{self.name}({arguments}) -> {result}"

    @cached_property
    def overload(self) -> Callable[..., Any]:
        overload: Callable[..., Any] = getattr(torch.ops.hyperslab, self.name).default
        return overload

    def __call__(self, *given: Any) -> Any:
        """Runs it, past torch's dispatcher where that would only call it.

        It takes longer to come back to Python than a block of a few voxels.
        """
        idle = not (
            torch.is_grad_enabled()
            or dispatch_modes_active()
            or function_modes_active()
            or profiler_runs()
        )
        first = given[0]
        if idle and type(first) in _OF_TORCH:
            if first.is_cpu:
                return self.on_cpu(*given)
            if first.is_cuda and self.cuda is not None and triton_runs():
                return self.on_cuda(*given)
        return self.overload(*given)

    def on_cpu(self, *arguments: Any) -> Any:
        """Runs the C version where there is one for these operands, else the reference."""
        functions = library()
        if (
            self.cpu is not None
            and functions is not None
            and not (_forced.get() and self._is_forced())
        ):
            # What the class makes them by looks at them in Python.
            result = self.cpu(functions, tuple.__new__(self.operands, arguments))
            if result is not NotImplemented:
                return result
        return self.reference(*arguments)

    def runs_in_c(self) -> bool:
        """Tells if there is a C version, compiled and not forced away; it may decline operands."""
        forced_away = _forced.get() and self._is_forced()
        return self.cpu is not None and library() is not None and not forced_away

    def on_cuda(self, block: torch.Tensor, *rest: Any) -> Any:
        """Runs the Triton version where it knows the dtypes, else the reference."""
        others = [value for value in rest if isinstance(value, torch.Tensor | torch.dtype)]
        types = {value if isinstance(value, torch.dtype) else value.dtype for value in others}
        usual = {*TYPE_CODES, torch.uint8, torch.float64 if self.doubles else torch.uint8}
        known = block.dtype in usual and types <= {*usual, *self.beside}
        if not known or not triton_runs() or self._is_forced():
            return self.reference(block, *rest)
        with torch.cuda.device(block.device):  # Triton starts its kernels on the current one
            return self.triton(block, *rest)

    def _is_forced(self) -> bool:
        return _forced.get().get(self.name) == "reference"

    def triton(self, *arguments: Any) -> Any:
        assert self.cuda is not None, f"{self.name} has no Triton version"
        return _triton_version(self.cuda, self.name)(self.operands(*arguments))


_OF_TORCH = (torch.Tensor, torch.nn.Parameter)
"""Types whose operators nobody has taken over."""


@cache
def _triton_version(module: str, name: str) -> Callable[[Operands], Any]:
    found = importlib.import_module(f"hyperslab.kernels.cuda.{module}")
    version: Callable[[Operands], Any] = getattr(found, f"triton_{name}")
    return version


OPERATORS: dict[str, KernelOperator] = {}
"""All operators by name: importing `hyperslab.kernels` declares them."""

_LIBRARY = torch.library.Library("hyperslab", "DEF")


def declare(
    reference: Callable[..., Any],
    cpu: Callable[[Library, Operands], Any] | None = None,
    source: str = "",
    cuda: str | None = None,
    **more: Any,
) -> None:
    """Makes a `KernelOperator` known to torch, as ``torch.ops.hyperslab.NAME``."""
    operator = KernelOperator(reference, cpu, source, cuda, **more)
    _LIBRARY.define(operator.schema)
    _LIBRARY.impl(operator.name, reference, "CompositeExplicitAutograd")
    _LIBRARY.impl(operator.name, operator.meta or reference, "Meta")
    _LIBRARY.impl(operator.name, operator.on_cpu, "CPU")
    if cuda is not None and _guest.installed:
        _LIBRARY.impl(operator.name, operator.on_cuda, "CUDA")
    OPERATORS[operator.name] = operator


# Triton as a guest.


@dataclass(slots=True)
class _Guest:
    """Keeps whether Triton may run in this process, to which its driver and its cache belong."""

    installed: bool
    refused: bool = False


_guest = _Guest(importlib.util.find_spec("triton") is not None)

TRITON_NEEDS = (
    "Triton needs a C compiler (CC names one), Python's headers (python3-dev), and a folder of "
    "this user's (XDG_CACHE_HOME or TRITON_CACHE_DIR names one)"
)


def triton_runs() -> bool:
    """Says if the Triton kernels run on a CUDA device; the references do otherwise."""
    return _guest.installed and not _guest.refused


def refuse_triton() -> None:
    """Lets the references run from now on, as another rank's Triton does not work."""
    _guest.refused = True


@cache
def why_triton_fails(device: torch.device) -> str | None:
    """Runs one small kernel on the device, once a process; returns what went wrong, or None."""
    if not _guest.installed:
        return "Triton is not installed"
    try:
        _keep_triton_cache()
        x = torch.arange(24.0, device=device).view(1, 2, 3, 2, 2)
        reorder = OPERATORS["reorder"]
        found = reorder.triton(x, True, torch.bfloat16)
        if not torch.equal(found, reorder.reference(x, True, torch.bfloat16)):
            return "its kernels compute something else than torch"
    except Exception as error:  # a guest may fail in any way
        return reason(error).strip().replace("\n", " ")
    return None


def _keep_triton_cache() -> None:
    """Has Triton keep what it compiles in a folder of this node below the user's cache folder.

    A folder that the user has named stays.
    """
    if not {"TRITON_CACHE_DIR", "TRITON_HOME"} & os.environ.keys():
        folder = make_private(user_folder("XDG_CACHE_HOME", f"triton/{socket.gethostname()}"))
        importlib.import_module("triton.knobs").cache.dir = str(folder)


# What the choice depends on.


_as_if: ContextVar[str | None] = ContextVar("as_if", default=None)
_forced: ContextVar[Mapping[str, str]] = ContextVar("forced", default={})  # noqa: B039 - never written


@contextmanager
def choose_as_if_on(kind: str) -> Iterator[None]:
    """Chooses as on this kind of device, wherever the tensors are: to trace what it would run."""
    token = _as_if.set(kind)
    try:
        yield
    finally:
        _as_if.reset(token)


@contextmanager
def force(implementations: Mapping[str, str]) -> Iterator[None]:
    """Runs these implementations, by operator, wherever they support the operands.

    For tests and benchmarks. ``{"conv weight": "winograd"}`` forces a pass of a convolution,
    ``{"chain_forward": "reference"}`` an operator that is declared with its reference.
    """
    known = {operator: {case.implementation for case in cases} for operator, cases in RULES.items()}
    for operator, implementation in implementations.items():
        if implementation not in known.get(operator, {"reference"}):
            raise ValueError(f"{operator} has no implementation {implementation!r}")
    token = _forced.set({**_forced.get(), **implementations})
    try:
        yield
    finally:
        _forced.reset(token)


def device_kind(x: torch.Tensor) -> str:
    """Returns the kind of device to choose for: ``x``'s, but for `choose_as_if_on`."""
    return _as_if.get() or x.device.type


def circumstances(x: torch.Tensor) -> tuple[object, ...]:
    """Returns all that a choice for ``x`` depends on and that may change between two calls.

    Plans that hold a choice are kept by it.
    """
    forced = _forced.get()
    return device_kind(x), onednn_enabled(), frozenset(forced.items()) if forced else None


@dataclass(frozen=True, slots=True)
class Case:
    """Holds one line of the rule: an implementation, when it is taken, and why.

    ``when`` decides if it is the best one, ``supports`` if it computes the operands at all.
    """

    implementation: str
    file: str
    words: str
    why: str
    when: Callable[..., bool] = lambda *_: True
    supports: Callable[..., bool] = lambda *_: True


class ConvFacts(NamedTuple):
    """Holds what the memory format of a convolution depends on.

    ``alike``: weight and block have one type and one device.
    """

    kernels: Kernels
    kind: str
    dtype: torch.dtype
    dims: int
    alike: bool
    onednn: bool


def _convolves_on_cpu(facts: ConvFacts) -> bool:
    # Nothing in here may differ between the ranks of a grid: they exchange blocks in this format.
    return (
        facts.kernels != "torch"
        and facts.alike
        and facts.dims in CHANNELS_LAST
        and facts.kind == "cpu"
        and facts.onednn
        and facts.dtype in (torch.float32, torch.bfloat16)
        and onednn_supports(torch.float32)
    )


def _cudnn_takes_last(facts: ConvFacts) -> bool:
    return (
        facts.kernels != "torch"
        and facts.kind == "cuda"
        and facts.dims in CHANNELS_LAST
        and facts.alike
        and facts.dtype in (torch.bfloat16, torch.float16)
    )


@cache
def onednn_supports(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return onednn_has_bfloat16()
    return dtype == torch.float32


def _in_c(x: torch.Tensor) -> bool:
    return device_kind(x) == "cpu" and x.dtype in TYPE_CODES and library() is not None


def _maximum_by_windows(x: torch.Tensor, kernel: Sequence[int], dilation: int) -> bool:
    return x.dim() == 5 and dilation == 1 and math.prod(kernel) <= MOST_TAPS and _in_c(x)


def _average_by_maps(x: torch.Tensor) -> bool:
    autocast = torch.is_autocast_enabled(x.device.type)
    widened = x.dtype == torch.bfloat16 and x.dim() == 5 and autocast  # avg_pool3d only
    return (x.dtype == torch.float32 or widened) and _in_c(x)


FEW_CHANNELS = 16
"""Channels of both volumes up to which the direct kernels in bfloat16 are faster than oneDNN."""

FEWEST_CHANNELS = 4
"""Channels of a volume, for which oneDNN does the work of many."""

WORTH_COLUMNS = 1 << 22
"""Products from which on a copy of the input counts less than what it saves."""

COPIED = 1 << 22
"""Elements of both volumes up to which an implementation may copy them."""

MANY_TAPS = 5
"""Taps of the last dim from which on they are worth a place as channels."""

SMALL_SAMPLE = 4**3
"""Voxels of a sample's result up to which oneDNN's weight gradient is slower than a product."""

MANY_CHANNELS = 64
"""Channels from which on that is so."""

FEW_VOXELS = 1 << 10
"""Voxels up to which a product of matrices takes less time than to call oneDNN, of one voxel each.

Half as long for 64 voxels, 256 to 1,000 channels and 128 filters.
"""

LIGHT_WEIGHT = 0.04
"""Elements of the weight for one of both volumes from which on windows are rows of a matrix."""

FEW_SUMS = 3.5
"""Elements of the weight for one of both volumes from which on its gradient is few sums."""

WEIGHT_TO_VOLUMES = {torch.float32: 6.0, torch.bfloat16: 1.0}
"""Elements of the weight for one of both volumes up to which Winograd's sums pay."""


def _in_tiles(problem: Problem) -> bool:
    """Says if oneDNN has kernels for AMX for it."""
    # There oneDNN multiplies eight times as many numbers of bfloat16 at a time as in registers.
    return problem.dtype == torch.bfloat16 and processor_has_matrix_tiles()


def _few_channels(problem: Problem) -> bool:
    if _in_tiles(problem):
        return False
    # Of very few by sixteen the kernel does as much for nothing as oneDNN.
    fewer, more = sorted((problem.x[1], problem.y[1]))
    half = FEW_CHANNELS // 2
    return more <= half or (fewer >= half and more <= FEW_CHANNELS)


def _fewest_channels(problem: Problem) -> bool:
    # Of one channel torch's is faster, of 16 by 16 Winograd's.
    pairs = problem.x[1] * problem.y[1]
    if _in_tiles(problem):
        few = sorted((problem.x[1], problem.y[1]))
        if _windows(problem):
            return pairs <= FEW_CHANNELS // 2
        return few[0] <= FEWEST_CHANNELS and few[1] <= FEW_CHANNELS
    return _few_channels(problem) and problem.x[1] > 1 and pairs < FEW_CHANNELS**2


def _narrow(problem: Problem) -> bool:
    # In float32 oneDNN has kernels of its own for one channel.
    wide = problem.kernel[-1] >= MANY_TAPS and problem.products >= WORTH_COLUMNS
    return problem.dtype == torch.bfloat16 and wide


def _windows(problem: Problem) -> bool:
    return math.prod(problem.kernel) > 1


def _outweighs(problem: Problem) -> bool:
    return problem.heavy and problem.dtype == torch.float32


def _small_tiles(problem: Problem) -> bool:
    # Of large volumes a step may fit by less than the copies that the product takes.
    return _windows(problem) and math.prod(problem.x) + math.prod(problem.y) <= COPIED


def _sums_pay(problem: Problem) -> bool:
    """Says if Winograd's sums take less time than the products that they save."""
    if _in_tiles(problem) and not overruns(problem):
        return False
    return problem.weight_to_volumes <= WEIGHT_TO_VOLUMES[problem.dtype]


def _multiplies_tiling_windows(problem: Problem) -> bool:
    if _in_tiles(problem):
        if not _windows(problem):
            return problem.x[1] > FEW_CHANNELS
        return problem.weight_to_volumes > LIGHT_WEIGHT
    return takes_im2col(problem) or not _windows(problem)


def _sums_few(problem: Problem) -> bool:
    least = 1.0 if max(problem.options.stride) > 1 else FEW_SUMS
    return _in_tiles(problem) and problem.weight_to_volumes > least


def _fills_channels(problem: Problem) -> bool:
    return problem.x[1] <= FEWEST_CHANNELS and problem.products >= WORTH_COLUMNS


def _flips(problem: Problem) -> bool:
    if is_depthwise(problem):  # there oneDNN's backward pass is a plain loop
        return True
    if _in_tiles(problem):
        few = problem.y[1] <= FEW_CHANNELS // 2
        return few and problem.options.groups == 1 and min(problem.kernel) > 1
    # Where the extents differ the flipped kernel multiplies more numbers.
    even = problem.x[2:] == problem.y[2:] or takes_im2col(problem)
    return problem.dtype == torch.float32 and even and _windows(problem)


def _widens(problem: Problem) -> bool:
    return problem.dtype == torch.bfloat16 and not onednn_supports(torch.bfloat16)


def _is_miscounted(problem: Problem) -> bool:
    by_channel = problem.options.groups == problem.x[1] > 1
    dilated = by_channel and max(problem.options.dilation) > 1
    return problem.dtype == torch.bfloat16 and (dilated or problem.makes_lone_column)


def _steps_by_channel(problem: Problem) -> bool:
    in_three = problem.dtype == torch.bfloat16 and is_depthwise(problem)
    return in_three and max(problem.options.stride) > 1


def _steps_unevenly(problem: Problem) -> bool:
    if problem.dtype != torch.bfloat16 or _in_tiles(problem) or _windows(problem):
        return False
    steps = zip(problem.x[2:], problem.y[2:], problem.options.stride, strict=True)
    return any(s > 1 and e != s * o for e, o, s in steps)


def _few_voxels(problem: Problem) -> bool:
    return not _widens(problem) and problem.x[0] * math.prod(problem.x[2:]) <= FEW_VOXELS


def _small_samples(problem: Problem) -> bool:
    small = not _widens(problem) and problem.x[0] > 1 and math.prod(problem.y[2:]) <= SMALL_SAMPLE
    return small and min(problem.x[1], problem.y[1]) >= MANY_CHANNELS


def _conv_case(
    task: Task,
    implementation: str,
    words: str,
    why: str,
    when: Callable[[Problem], bool] = lambda _: True,
) -> Case:
    """Makes a case of a pass, which its implementation must support."""
    variant = CONV_VARIANTS[task][implementation]
    return Case(implementation, variant.file, words, why, when, variant.legal)


_forward, _of_input, _of_weight = (partial(_conv_case, task) for task in CONV_VARIANTS)

FEW = f"bfloat16, at most {FEW_CHANNELS} channels, no stride, AVX-512 with bfloat16, no AMX"
FEW_REASON = "oneDNN works on 16 channels, however few there are"
VOXELS = f"windows of one voxel, at most {FEW_VOXELS:,}"
VOXELS_REASON = "one product of matrices: a call of oneDNN takes longer than the work"
WIDENED = "bfloat16, no AVX-512"
WIDENED_REASON = "in float32, slab by slab: torch's own loops take ten to a hundred times as long"
OVERRUN = "bfloat16, AMX, rows that outgrow the second-level cache over few planes"
OVERRUN_REASON = "oneDNN writes beyond its memory"
HEAVY = f"float32, weight > {HEAVY_WEIGHT} volumes"
HEAVY_REASON = "the order of the weight counts, and parameters are contiguous"

RULES: dict[str, tuple[Case, ...]] = {
    "conv": (
        Case(
            "channels last",
            "conv.py",
            "CPU, float32 or bfloat16, 2 or 3 dims, oneDNN",
            "faster in all three passes, and operands need no copy",
            _convolves_on_cpu,
        ),
        Case(
            "cudnn channels last",
            "conv.py",
            "CUDA, half precision",
            "cuDNN's kernels are written for it; contiguous operands are turned for every pass",
            _cudnn_takes_last,
        ),
        Case("torch", "conv.py", "else", "torch knows best"),
    ),
    "max_pool": (
        Case(
            "windows",
            "max_pool.py, csrc/windows.c",
            f"CPU, 3 dims, at most {MOST_TAPS} taps, no dilation",
            "torch's takes 2.6 times as long (2.13), keeps the input and 8 bytes an element for 1",
            supports=_maximum_by_windows,
        ),
        Case("torch", "", "else", "it runs everywhere"),
    ),
    "avg_pool": (
        Case(
            "sparse",
            "resample.py, csrc/resample.c",
            "CPU, float32 (of 3 dims under autocast half precision, too)",
            "torch's takes three to sixteen times as long (2.13) and keeps the input",
            supports=_average_by_maps,
        ),
        Case("torch", "", "else", "it runs everywhere"),
    ),
    "interpolate": (
        Case(
            "sparse",
            "resample.py, csrc/resample.c",
            "CPU, float32 or half precision",
            "torch's takes several times as long, in float32 only (2.13)",
            supports=_in_c,
        ),
        Case("torch", "", "else", "it runs everywhere"),
    ),
    "conv forward": (
        _forward("registers", FEW, FEW_REASON, _few_channels),
        _forward("widened", WIDENED, WIDENED_REASON, _widens),
        _forward(
            "widened",
            "bfloat16, at most 16 channels by themselves, 15 taps or more in the last dim",
            "oneDNN may never end",
            lambda problem: problem.hangs,
        ),
        _forward(
            "columns",
            f"bfloat16, one channel, {MANY_TAPS} taps or more in the last dim",
            "oneDNN's kernels for bfloat16 do the work of many channels for one",
            _narrow,
        ),
        _forward("voxels", VOXELS, VOXELS_REASON, _few_voxels),
        _forward("contiguous", HEAVY, HEAVY_REASON, _outweighs),
        Case("onednn", "conv_variants.py", "else", "it runs at the processor's peak"),
    ),
    "conv input": (
        _of_input(
            "registers",
            FEW,
            FEW_REASON,
            lambda problem: _few_channels(problem) and _windows(problem),
        ),
        _of_input("widened", WIDENED, WIDENED_REASON, _widens),
        _of_input("voxels", VOXELS, VOXELS_REASON, _few_voxels),
        _of_input("contiguous", HEAVY, HEAVY_REASON, _outweighs),
        _of_input(
            "matrix",
            f"windows of several voxels tile the volume; {COPIED:,} elements or fewer",
            "one product of matrices, and nothing is added up",
            _small_tiles,
        ),
        _of_input(
            "parity",
            f"windows of 3 in steps of 2, at most {FEWEST_CHANNELS} channels, not small",
            "oneDNN works on 16 channels: there are as many of eight results at once",
            _fills_channels,
        ),
        _of_input(
            "flipped",
            "no stride, and float32, extents unchanged or small; or every channel by itself; "
            f"or bfloat16 with AMX, a result of at most {FEW_CHANNELS // 2} channels",
            "oneDNN's forward pass is faster than its backward one",
            _flips,
        ),
        _of_input(
            "float32",
            "bfloat16, every channel by itself, kernel larger than the volume",
            "oneDNN computes wrong gradients in bfloat16, and torch's own way is a plain loop",
        ),
        _of_input(
            "widened",
            "bfloat16, every channel by itself in 3 dims with a step; or, without AMX, single "
            "voxels by a step that does not divide the extents",
            "the way of torch or oneDNN is a plain loop, seven times as slow",
            lambda problem: _steps_by_channel(problem) or _steps_unevenly(problem),
        ),
        _of_input("onednn", "no groups, no dilation", "faster than torch's im2col"),
        Case("torch", "conv_variants.py", "else", "it computes everything"),
    ),
    "conv weight": (
        _of_weight(
            "registers",
            f"{FEW}; with AMX, single voxels and at most {FEWEST_CHANNELS} of one volume, "
            f"or at most {FEW_CHANNELS // 2} pairs of channels",
            FEW_REASON,
            _fewest_channels,
        ),
        _of_weight(
            "im2col",
            f"several samples of at most {SMALL_SAMPLE} voxels, {MANY_CHANNELS} channels or more",
            "few sums of many numbers, for which oneDNN's kernel is not made",
            _small_samples,
        ),
        _of_weight(
            "depthwise",
            "every channel by itself in 3 dims, no stride, AVX2 or AVX-512",
            "oneDNN has no kernel for it in three dims and takes ten times as long",
        ),
        _of_weight(
            "winograd",
            "3 x 3 x 3, no stride, 8 channels or more, AVX2 or AVX-512, weight not large; "
            "with AMX in bfloat16 where oneDNN overruns",
            "64 products for 216",
            _sums_pay,
        ),
        _of_weight("widened", WIDENED, WIDENED_REASON, _widens),
        _of_weight(
            "matrix",
            "windows tile the volume: of one voxel, small in float32; with AMX in bfloat16 of "
            f"one voxel and more than {FEW_CHANNELS} channels, or weight > {LIGHT_WEIGHT} volumes",
            "one product of matrices, where torch takes im2col",
            _multiplies_tiling_windows,
        ),
        _of_weight(
            "im2col",
            f"bfloat16, AMX, weight > {FEW_SUMS} volumes, or > volumes and a step",
            "few sums of many numbers",
            _sums_few,
        ),
        _of_weight(
            "widened",
            "bfloat16, every channel by itself with dilation, or one column by a step of several",
            "oneDNN's kernels count voxels wrong",
            _is_miscounted,
        ),
        _of_weight(
            "widened",
            f"bfloat16, AMX, one channel, {MANY_TAPS} taps or more in the last dim",
            "oneDNN's kernels for bfloat16 do the work of many channels for one",
            lambda problem: _in_tiles(problem) and _narrow(problem) and problem.x[1] == 1,
        ),
        _of_weight("turned", OVERRUN, f"{OVERRUN_REASON}, and not so", overruns),
        _of_weight("widened", OVERRUN, f"{OVERRUN_REASON}, either way", overruns),
        _of_weight(
            "contiguous",
            "bfloat16, every channel by itself in 3 dims with a step",
            "channels last, oneDNN has no kernel for it in three dims",
            _steps_by_channel,
        ),
        _of_weight(
            "contiguous",
            "weight > volumes",
            HEAVY_REASON,
            lambda problem: problem.weight_to_volumes > 1 and _windows(problem),
        ),
        _of_weight(
            "halves",
            "float32, one small sample, even number of planes",
            "torch takes im2col, but oneDNN for a batch",
            takes_im2col,
        ),
        _of_weight(
            "contiguous",
            "float32, one small sample",
            "torch takes im2col, but oneDNN for its own tensors",
            takes_im2col,
        ),
        Case("torch", "conv_variants.py", "else", "torch takes oneDNN"),
    ),
}
"""The rule by operator: the first case that holds is taken."""


def choose(operator: str, *facts: Any) -> str:
    """Returns the implementation that runs, by name: the rule's, or one that `force` asks for."""
    cases = RULES[operator]
    forced = _forced.get().get(operator)
    if forced is not None:
        for case in cases:
            if case.implementation == forced and case.supports(*facts):
                return forced
    return next(
        case.implementation for case in cases if case.supports(*facts) and case.when(*facts)
    )


_choose_by_rule = lru_cache(PROBLEMS)(choose)
"""Chooses by facts or a problem, while no implementation is forced."""


def conv_format(x: torch.Tensor, weight: torch.Tensor, kernels: Kernels) -> str:
    """Returns how the operands of a convolution lie in memory: a case of the rule, by name."""
    alike = x.dtype == weight.dtype and x.device == weight.device
    return format_for(kernels, device_kind(x), x.dtype, x.dim(), alike)


def format_for(
    kernels: Kernels, kind: str, dtype: torch.dtype, dims: int, alike: bool = True
) -> str:
    """Returns what `conv_format` does, by what it depends on."""
    facts = (kernels, kind, dtype, dims, alike, onednn_enabled())
    return choose("conv", ConvFacts(*facts)) if _forced.get() else _format_by_rule(*facts)


@lru_cache(PROBLEMS)
def _format_by_rule(*facts: Any) -> str:
    return choose("conv", ConvFacts(*facts))


def casts_filters_last(weight: torch.Tensor, dtype: torch.dtype, kernels: Kernels) -> bool:
    """Says if filters of another type are cast to channels last.

    oneDNN turns contiguous ones in bfloat16 at every call: half the time of a convolution of 64
    voxels.
    """
    if dtype != torch.bfloat16 or weight.dtype == dtype or not onednn_supports(dtype):
        return False
    windows = weight.shape[1] > 1 < math.prod(weight.shape[2:])
    kind = device_kind(weight)
    return windows and format_for(kernels, kind, dtype, weight.dim()) == "channels last"


def conv_variant(problem: Problem) -> str:
    operator = f"conv {problem.task}"
    return (choose if operator in _forced.get() else _choose_by_rule)(operator, problem)


def table() -> list[tuple[str, str, str, str, str]]:
    """Lists the rule: operator, case, implementation, its file, and why."""
    rows = [
        (operator, case.words, case.implementation, case.file, case.why)
        for operator, cases in RULES.items()
        for case in cases
    ]
    for name, one in OPERATORS.items():
        file = f"{one.reference.__module__.rpartition('.')[2]}.py"
        if one.cpu is not None:
            words = "CPU, dtypes and dims that the C code takes"
            rows.append((name, words, "C", f"csrc/{one.source}", "one pass over memory"))
        if one.cuda is not None:
            words = f"CUDA, {'few numbers' if one.doubles else 'float32 and half precision'}"
            rows.append((name, words, "Triton", f"cuda/{one.cuda}.py", "one pass over memory"))
        rows.append((name, "else", "reference", file, "it runs everywhere"))
    return rows


def missing_instructions() -> list[str]:
    """Names what this machine's rule leaves out, for want of a compiler or of instructions."""
    if library() is None:
        return ["C: not compiled (see `hyperslab compile`), or HYPERSLAB_COMPILE=0"]
    known = {
        "registers: AVX-512 with bfloat16": direct_is_known(),
        "winograd: AVX2 or AVX-512": winograd_is_known(),
        "depthwise: AVX2 or AVX-512": depthwise_is_known(),
        "bfloat16 in oneDNN: AVX-512": onednn_supports(torch.bfloat16),
    }
    return [name for name, there in known.items() if not there]
