"""Keeps the state of a cut tensor's block: deferred or computed, its memory, order and base.

[Note: states] Four things are known of a block, each independent of the others but for the rules
below. Each arrow is one method, and nothing outside of this file assigns the attributes.

    value       pending       COMPUTED --put_off, put_off_in_place--> DEFERRED --extend--+
                                  ^                                    |    ^            |
                                  +--------------- force --------------+    +------------+
                              (COMPUTED --replace_storage--> COMPUTED, in place)

    memory      private       SHARED -------- mark_as_private (a rule made it) ----> PRIVATE
                              PRIVATE ------- share (local, a view, an alias) -----> SHARED

    order       reordered     SERIAL -------- mark_as_reordered -------------------> REORDERED
                              REORDERED --------- local, for a reader -------------> SERIAL

    base        is_copy       OWN -- mark_as_copy --> COPY -- its base changes --> unusable
                is_crop       OWN -- mark_as_crop --> CROP

- A rule makes a tensor by `Sharded.like`: COMPUTED, PRIVATE if its memory is ``fresh``, REORDERED
  if it lies channels last where serial torch has it contiguous; or by `Sharded.will_be`: DEFERRED.
- DEFERRED is PRIVATE and OWN: there is no memory yet that anybody could have seen.
- The source of a deferred tensor has it among its ``readers``. Code that uses the source but reads
  the block alone forces them before (`force_readers`), so that they see it unchanged.
- A computed tensor may remember what it was computed from, its `recipe`, until its version
  changes: a backward pass computes it once more where nobody keeps the block.
- A view of a COPY or a CROP is one, too; nothing leads back to OWN but a new tensor.

[Note: copies] Where serial torch has a view a rule may return a copy. Nothing may change the one
without the other's notice: the copy cannot be used once its base was changed, nor be changed in
place, unless it remembers its place: then what it becomes is written into its base as well.

[Note: pending] A rule may return a tensor whose block is not there yet: its `pending` says what
it will be. The next rule either takes that over, as a link of a chain, or is one that does not
know of it: then the block is computed first. What it will be computed from must stay as it is
meanwhile, so any other use of that tensor, its *source*, has the block computed before.

[Note: order] Convolutions on the CPU like channels last. Rules keep a block in that order, and
mark the tensor as `reordered`, where serial torch has it contiguous; ``local`` gives torch's
order.

[Note: functions] Torch asks no ``__torch_function__`` when a ``torch.autograd.Function`` is
applied, and a network, a loss or a backward pass may apply one to a cut tensor at any time. So
`watch_functions` wraps ``apply`` when the first tensor of a grid is cut, and takes the wrapper off
when the last such grid ends: a program that cuts nothing keeps torch's. `before_functions` says
what happens before a function runs, and `seeing_serial_gradients` which gradients its backward
sees. ``torch.vmap``, ``torch.func.grad`` and what ``torch.jit`` has made do not ask either, and
would take a block for all of the tensor: what they begin with is wrapped as long, and refuses. For
a function that ``torch.jit.script`` has made the Python runs that it was made of.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.autograd import Function

from hyperslab.comm import Grid, per_grid
from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.util.derivatives import LinearMap
from hyperslab.util.torch_internals import (
    DisableTorchFunctionSubclass,
    asks_for_rules,
    dispatch_modes_active,
    function_transforms,
    saved_tensor_hooks,
    source_of_scripted,
    storage_address,
    swap_tensor_impl,
    tree_leaves,
    version_of,
)

PrepareFunction = Callable[[type[Function], tuple[Any, ...]], type[Function]]
"""Maps a function's class and all arguments of a call to the class that is applied."""

# Torch runs the backward pass of every device in a thread of its own.
_backward_state = threading.local()


def sees_serial_gradients() -> bool:
    """Tell whether code inside a backward pass that asks for a gradient wants the serial one."""
    return getattr(_backward_state, "serial", False)


@contextmanager
def seeing_serial_gradients(serial: bool = True) -> Iterator[None]:
    """Let `sees_serial_gradients` return ``serial`` within it."""
    before = sees_serial_gradients()
    _backward_state.serial = serial
    try:
        yield
    finally:
        _backward_state.serial = before


_regions = threading.local()


@contextmanager
def nothing_stays_deferred() -> Iterator[None]:
    """Compute at its end what was put off within it and still is."""
    before = getattr(_regions, "put_off", None)
    made: list[weakref.ref[DeferredTensor]] = []
    _regions.put_off = made
    try:
        yield
    finally:
        _regions.put_off = before
    for reference in made:
        tensor = reference()
        if tensor is not None:
            tensor.force()


_PREPARATIONS: list[PrepareFunction] = []


def before_functions(prepare: PrepareFunction) -> None:
    """Call ``prepare`` whenever a function is applied, the one that was added last first."""
    _PREPARATIONS.insert(0, prepare)


_WRAPPERS: list[tuple[Any, str, Callable[[Any], Any]]] = []


def wrap_while_cut(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Have an attribute replaced by what ``wrap`` makes of it, while tensors are cut."""
    _WRAPPERS.append((owner, name, wrap))


class _WatchedFunctions:
    """Wraps what asks no ``__torch_function__``, while a grid exists of which tensors are cut."""

    def __init__(self) -> None:
        self._grids: set[int] = set()  # by id
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # owner, name, original, wrapper

    def watch(self, grid: Grid) -> None:
        """Wrap from now on until this grid has ended, and all others."""
        key = id(grid)
        if not self._grids:
            self._replaced = []
            self._replace(Function, "apply", self._prepared_apply)
            for owner, name, does, remedy in function_transforms():
                self._replace(owner, name, functools.partial(_refusing, does, remedy))
            for owner, name, wrap in _WRAPPERS:
                self._replace(owner, name, wrap)
        self._grids.add(key)
        weakref.finalize(grid, self._unwatch, key).atexit = False

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace an attribute, which may be inherited: torch has no hook for it."""
        original = vars(owner).get(name) or getattr(owner, name)
        wrapper = wrap(original)
        setattr(owner, name, wrapper)
        self._replaced.append((owner, name, original, wrapper))

    def _prepared_apply(self, original: Any) -> Any:
        replaced = self._replaced

        @functools.wraps(Function.apply)
        def run(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
            if self._replaced is replaced:
                for prepare in _PREPARATIONS:
                    cls = prepare(cls, (*args, *kwargs.values()))
            # Written in Python up to torch 2.14 and in C since then: both are bound like this.
            return original.__get__(None, cls)(*args, **kwargs)

        return classmethod(run)

    def _unwatch(self, key: int) -> None:
        self._grids.discard(key)
        if self._grids:
            return
        for owner, name, original, wrapper in self._replaced:
            # Another library may have wrapped this wrapper, which then stays and does nothing.
            if vars(owner)[name] is wrapper:
                setattr(owner, name, original)
        self._replaced = []


def _refusing(does: str, remedy: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that would take the block of a cut tensor for all of it."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, DeferredTensor):
                source = source_of_scripted(args[0] if args else None)
                if source is not None:
                    return source(*args[1:], **kwargs)
                raise UnsupportedOp(
                    f"{does} cannot look at a cut tensor; nothing was computed\n    {value!r}\n"
                    f"    {remedy}, or use x.full()"
                )
        return original(*args, **kwargs)

    return run


_WATCHED = _WatchedFunctions()


@per_grid
def watch_functions(grid: Grid) -> None:
    """Watch what asks no ``__torch_function__``, as long as this grid exists."""
    _WATCHED.watch(grid)


def _changes(block: torch.Tensor) -> list[int]:
    """Count rules' changes of an inference tensor's memory, of which torch keeps no version."""
    storage: Any = block.untyped_storage()
    if not hasattr(storage, "_hyperslab_changes"):
        storage._hyperslab_changes = [0]
    changes: list[int] = storage._hyperslab_changes
    return changes


class _BaseOfCopy:
    """Notices changes of the block of which serial torch would have a view, from `watch` on."""

    _counter: torch.Tensor | None = None

    def watch(self, block: torch.Tensor) -> None:
        """Look at this block, which nobody could change before."""
        self._changes = _changes(block) if block.is_inference() else None
        self._counter = block.detach()
        self._counter.data = block.new_empty(0)  # shares the version counter, but no memory
        self._then = self._now

    @property
    def _now(self) -> int:
        assert self._counter is not None
        return version_of(self._counter) if self._changes is None else self._changes[0]

    @property
    def changed(self) -> bool:
        """Tell whether it was changed in place since."""
        return self._counter is not None and self._now != self._then


_AS_IT_IS = nullcontext()


def recording(graph: bool) -> AbstractContextManager[object]:
    """Record a graph or none, as ``torch.set_grad_enabled``, which costs time where it is so."""
    return _AS_IT_IS if graph == torch.is_grad_enabled() else torch.set_grad_enabled(graph)


def python_looks() -> bool:
    """Tell whether something in Python sees what operators in C take, or what they keep.

    Outside of a rule that is the rule of each operator: of a block that is put off, say.
    """
    return asks_for_rules() or dispatch_modes_active() > 0 or saved_tensor_hooks(True) is not None


class Deferred(Protocol):
    """Computes a block that is put off."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the type that the block will have."""

    @property
    def sources(self) -> Iterable[DeferredTensor]:
        """Return the tensors that it is computed from."""

    @property
    def recomputable(self) -> bool:
        """Tell whether a backward pass computes the block once more rather than keep it."""

    def value(self) -> torch.Tensor:
        """Compute the block, with its graph."""


class DeferredTensor(torch.Tensor):
    """Holds a block that may be deferred, reordered or a copy; see the note on states."""

    pending: Deferred | None = None
    """It is DEFERRED: what the block will be."""
    readers: tuple[weakref.ref[DeferredTensor], ...] = ()
    """The tensors that are deferred and have this one for their source."""
    private = False
    """Only rules have seen its memory: it stays as it is until one of them changes it.

    The same on all ranks, also where a view is empty or a copy on some of them.
    """
    reordered = False
    """It lies channels last, where serial torch has it contiguous."""
    bypass: str | None = None
    """Why no gradient comes through: a consumer computed what it needed from the sources."""
    is_crop = False
    """It is a view without some elements of a cut dim; on some ranks none: blocks look whole."""
    _base_of_copy: _BaseOfCopy | None = None
    _place: tuple[DeferredTensor, int, object, Callable[[Any], None]] | None = None  # of a copy
    _views_in_place = 0  # how often its dims have become others
    _copied: _BaseOfCopy | None = None  # by tensors that stand for parts of what is pending
    _own: torch.Tensor | None = None  # the block where it is not this tensor's memory
    _computed: tuple[Deferred, int] | None = None  # from what, and the version that it has since

    @property
    def _block(self) -> torch.Tensor:
        if self.pending is not None:
            self._compute()
        if self._own is not None:
            return torch.ops.aten.alias(self._own)  # without a graph where none is wanted
        with DisableTorchFunctionSubclass():
            return torch.Tensor.as_subclass(self, torch.Tensor)

    @property
    def is_its_block(self) -> bool:
        """Tell whether this tensor has the memory and the history of its block."""
        return self.pending is None and self._own is None and self._base_of_copy is None

    def force(self) -> None:
        """Compute what is deferred here, and what has this tensor for its source."""
        self.force_readers()
        if self.pending is not None:
            self._compute()

    def force_readers(self) -> None:
        """Compute what has this tensor for its source."""
        readers, self.readers = self.readers, ()
        for reader in readers:
            found = reader()
            # One that has been computed reads no more; autograd may hold it for longer.
            if found is not None and found.pending is not None:
                found.force()

    def _compute(self) -> None:
        """Become what is pending; the object stays the same for all that refer to it."""
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            with torch.inference_mode(False):  # it was put off outside; grad mode is on in here
                return self._compute()
        assert self.pending is not None
        pending = self.pending
        recomputable = pending.recomputable
        with DisableTorchFunctionSubclass():  # as in a rule, where the tensor may be asked first
            value = pending.value()
        version = version_of(value) if recomputable else 0
        self.pending = None
        self.replace_storage(value)
        if self._copied is not None:
            self._copied.watch(self._block)
            self.share()
        if recomputable:
            self._computed = (pending, version)

    def replace_storage(self, value: torch.Tensor) -> None:
        """Take another block from now on: what an operator in place makes of it.

        For a `private` tensor; nobody else holds the object ``value``. Torch would note the change
        in a view of this tensor, and copy the whole gradient for it, twice.
        """
        # Who looks first may do so under no_grad, and who writes next may not.
        self._own = None
        self._computed = None
        try:
            swap_tensor_impl(self, value)  # ``value`` has the old one from now on
        except RuntimeError:  # torch's profiler knows it, or who keeps the value for a gradient
            self._own = value

    def check_on_path(self, what: str) -> None:
        """Refuse to watch gradients that do not come through here."""
        if self.bypass is not None:
            raise LayoutError(
                f"{what}: the gradient does not come through this tensor, which {self.bypass}"
                "\n    call it before the tensor is used"
            )

    @property
    def recipe(self) -> Deferred | None:
        """Tell what the block was computed from, or will be, unless it was changed since."""
        if self.pending is not None:
            return self.pending
        if self._computed is None:
            return None
        pending, version = self._computed
        with DisableTorchFunctionSubclass():
            return pending if version_of(self._block) == version else None

    def forget_origin(self) -> None:
        """Let rules use this tensor as they would one of unknown origin that has the same block."""
        self.force()
        self.share()
        self._computed = None

    @property
    def replaceable(self) -> bool:
        """Tell whether an operator in place may give it another block and drop the old one.

        Only where gradients are wanted.
        """
        with DisableTorchFunctionSubclass():
            wanted = torch.is_grad_enabled() and self._block.requires_grad
            return self.private and wanted and not self.retains_grad

    def _check_base_of_copy(self) -> None:
        """Refuse the use of a copy whose base was changed since."""
        if self._base_of_copy is not None and self._base_of_copy.changed:
            raise LayoutError(
                f"{self!r} is a copy where serial torch has a view, and the tensor that it was "
                "taken from was changed in place since\n    use the operator that returns a new "
                "tensor (inplace=False) there, or clone() what was taken before"
            )

    def mark_as_crop(self) -> None:
        """State that this view leaves elements of a cut dim away, on whichever ranks."""
        self.is_crop = True

    def mark_as_copy(self, base: DeferredTensor) -> None:
        """State that this is a copy of a part of ``base`` where serial torch would have a view.

        From now on it cannot be changed in place, nor be used once ``base`` was: the one would
        show in the other.
        """
        found = base._base_of_copy
        if found is None and base.pending is not None:
            found = base._copied = base._copied or _BaseOfCopy()
        elif found is None:
            found = _BaseOfCopy()
            found.watch(base._block)
        self._base_of_copy = found

    @property
    def is_copy(self) -> bool:
        """Tell whether serial torch would have a view here; see `mark_as_copy`."""
        return self._base_of_copy is not None

    def remember_place(
        self, base: DeferredTensor, place: object, write: Callable[[Any], None]
    ) -> None:
        """Let this copy of a part of ``base`` be changed in place: ``write`` writes it there."""
        self._place = (base, base._views_in_place, place, write)

    def forget_places(self) -> None:
        """State that its dims have become others: places in the ones before mean nothing now."""
        self._place = None
        self._views_in_place += 1

    @property
    def knows_its_place(self) -> bool:
        """Tell whether a change in place of this copy can be written into its base."""
        if self._place is None:
            return False
        base, views, _, _ = self._place
        return not base.is_copy and views == base._views_in_place

    def is_part_of(self, base: DeferredTensor, place: object) -> bool:
        """Tell whether this copy of that part of ``base`` is equal to it."""
        if self._place is None or self._base_of_copy is None or self._base_of_copy.changed:
            return False
        own, views, part, _ = self._place
        return own is base and views == base._views_in_place and part == place

    def begin_change_of_copy(self) -> None:
        """Let go of memory that other copies may have: they are unusable once this has changed."""
        self._check_base_of_copy()
        with DisableTorchFunctionSubclass():
            if self.requires_grad and self.is_leaf:
                return
        # Who changes it may do so under no_grad, and it keeps its graph.
        with torch.inference_mode(False), torch.set_grad_enabled(self._block.requires_grad):
            self.replace_storage(self._block.clone())

    def end_change_of_copy(self) -> None:
        """Write this copy, which was changed in place, into its base."""
        assert self._place is not None
        base, _, _, write = self._place
        write(self)
        self._base_of_copy = None
        self.mark_as_copy(base)

    def note_change(self) -> None:
        """Count a change in place by a rule, where torch does not."""
        block = self._block
        if block.is_inference():
            _changes(block)[0] += 1

    def _pass_on_to(self, other: DeferredTensor) -> None:
        """Make a view of a copy or of a crop one as well."""
        if self._base_of_copy is None and not self.is_crop:
            return
        with DisableTorchFunctionSubclass():
            memory = [storage_address(x.untyped_storage()) for x in (self, other)]
        if memory[0] == memory[1]:
            other._base_of_copy = self._base_of_copy
            other.is_crop = self.is_crop

    def put_off(self, pending: Deferred) -> None:
        """Compute this tensor's block later; it has no memory until then."""
        for source in pending.sources:
            alive = [reader for reader in source.readers if reader() is not None]
            source.readers = (*alive, weakref.ref(self))
        self.pending = pending
        self.private = True
        made = getattr(_regions, "put_off", None)
        if made is not None:
            made.append(weakref.ref(self))

    def put_off_in_place(self, pending: Deferred) -> None:
        """Let go of the block, which ``pending`` took over, and compute another one later."""
        with torch.no_grad():
            self.replace_storage(torch.empty(0, dtype=pending.dtype, device=self.device))
        self.put_off(pending)

    def extend(self, pending: Deferred) -> None:
        """Defer more than before: ``pending`` took over what this tensor was to become."""
        assert self.pending is not None
        self.pending = pending

    def share(self) -> None:
        """Count on others from now on, who see this tensor's memory and may change it."""
        self.private = False

    def mark_as_private(self) -> None:
        """State that a rule has just made this tensor's memory, and that nobody else sees it."""
        self.private = True

    def mark_as_reordered(self) -> None:
        """State that serial torch has it contiguous, where the block lies channels last."""
        self.reordered = True

    def mark_as_bypassed(self, why: str) -> None:
        """State that a consumer computed what it needed from the sources of what is deferred here.

        ``why`` goes on after "this tensor, which".
        """
        self.bypass = why

    def _in_serial_order(self) -> torch.Tensor:
        """Turn what is reordered; this tensor's own block is as in serial torch from now on."""
        inference = self._block.is_inference()
        with torch.set_grad_enabled(not inference), DisableTorchFunctionSubclass():
            self._own = LinearMap.apply(self._block, _contiguous, _as_it_comes)
        self.reordered = False
        return self._block


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """Makes contiguous memory by the compiled kernel, in a fraction of the time of torch's copy."""
    y: torch.Tensor = torch.ops.hyperslab.reorder(x, False, x.dtype)
    return y


def _as_it_comes(gradient: torch.Tensor) -> torch.Tensor:
    """Leaves a gradient in its order in memory; code that needs another one changes it."""
    return gradient


def _force_arguments(cls: type[Function], values: tuple[Any, ...]) -> type[Function]:
    """Have what is pending computed before an autograd function takes it.

    ``torch.autograd.Function.apply`` (reentrant checkpointing is one) asks in C++, past
    ``__torch_function__``, whether its arguments need gradients: of a placeholder that none does.
    """
    for value in values:
        if isinstance(value, DeferredTensor) and value.pending is not None:
            value.force()
    return cls


before_functions(_force_arguments)
