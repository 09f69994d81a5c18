"""A chain: what is still to be done with a block before somebody looks at it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.memory_format import dense, memory_format_of
from hyperslab.ops.chains.function import ChainFunction, Links
from hyperslab.ops.common.room import Room
from hyperslab.tensor import Sharded

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""For which there are fused kernels; float64 is for comparisons and takes the plain way."""


KEPT_UP_TO = 1 << 16
"""Elements of a block that is kept, though it could be computed again."""


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Links to be applied to the block of ``source``; see the note in `hyperslab.tensor.lazy`.

    ``version``: that of the block when the chain was begun; ``with_graph``: whether gradients were
    wanted then.
    """

    source: Sharded
    block: torch.Tensor
    version: int
    links: Links
    with_graph: bool
    room: Room | None = None
    """Where the result is to be made."""
    parents: tuple[tuple[weakref.ref[Sharded], Links], ...] = ()
    """The tensors that this chain was taken over from, with their links."""

    def linked(self, links: Links) -> Chain:
        """With these links in place of its own."""
        return Chain(
            self.source, self.block, self.version, links, self.with_graph, self.room, self.parents
        )

    def in_room(self, room: Room | None) -> Chain:
        """With its result there."""
        return Chain(
            self.source,
            self.block,
            self.version,
            self.links,
            self.with_graph,
            room,
            self.parents,
        )

    def taken_over(self, x: Sharded) -> Chain:
        """That of ``x``, for the next tensor."""
        parents = (*self.parents, (weakref.ref(x), self.links))
        return Chain(
            self.source, self.block, self.version, self.links, self.with_graph, None, parents
        )

    @property
    def sources(self) -> list[Sharded]:
        """What it is computed from: the source, or a parent that somebody still holds."""
        return [self.source, *(parent for parent, _ in self._alive())]

    def _alive(self) -> list[tuple[Sharded, Links]]:
        found = ((ref(), links) for ref, links in self.parents)
        return [(parent, links) for parent, links in found if parent is not None]

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return self.links.dtype

    @property
    def wants_gradient(self) -> bool:
        """Whether the result will have a graph."""
        if not self.with_graph:
            return False
        if self.block.requires_grad:
            return True
        statistics = self.links.statistics
        return statistics is not None and statistics.affine.requires_grad

    @property
    def recomputable(self) -> bool:
        """A normalised block is: what its normalisation keeps is all that it takes.

        But for a small one, which is kept in less time.
        """
        links = self.links
        large = self.block.numel() > KEPT_UP_TO
        return large and links.statistics is not None and not links.pool and not self._alive()

    def value(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The result, with its graph; in another type it is rounded once, to that one.

        Raises:
            LayoutError: the source was changed in place since, where no rule could see it.
        """
        if not self.block.is_inference() and self.block._version != self.version:
            raise LayoutError(
                f"{self.source.partition} was changed in place after an operator had read it whose "
                "result was not computed yet\n    change x.local, or a clone(), instead of an "
                "alias that was taken before"
            )
        links = self.links if dtype is None else self.links.rounded(dtype)
        for parent, done in reversed(self._alive()):
            # Who holds it may watch its gradient, or ask for it: it has to be in the graph.
            rest = links.after(done)
            with torch.set_grad_enabled(self.with_graph):
                block = dense(parent.block, memory_format_of(parent.block))
                return ChainFunction.apply(block, None, None, rest, self.room)
        with torch.set_grad_enabled(self.with_graph):
            return _apply(self.block, links, self.room)


@dataclass(frozen=True, slots=True, eq=False)
class Recomputable:
    """An operand that is kept for the backward pass as what it is computed from.

    ``tensors``: the block that a normalisation keeps, too.
    """

    tensors: tuple[torch.Tensor | None, ...]
    links: Links

    def value(
        self, tensors: tuple[torch.Tensor | None, ...], room: Room | None = None
    ) -> torch.Tensor:
        """The operand once more; with a graph where one is recorded."""
        (block,) = tensors
        assert block is not None
        if torch.is_grad_enabled():
            return _apply(block, self.links)
        return self.links.forward(block, mark=False, room=room)[0]


def _apply(block: torch.Tensor, links: Links, room: Room | None = None) -> torch.Tensor:
    affine = None if links.statistics is None else links.statistics.affine
    if affine is None:
        return ChainFunction.apply(block, None, None, links, room)
    return ChainFunction.apply(block, affine.weight, affine.bias, links, room)


def begin(x: Sharded) -> Chain | None:
    """The chain that an operator on ``x`` goes on with; None where there are no kernels for it.

    The one that is pending there, or a new one without links. All ranks decide alike: a node of
    the graph that is made at another time would let them send in another order.
    """
    if isinstance(x.pending, Chain):
        if torch.is_grad_enabled():
            return x.pending.taken_over(x)
        x.settle()  # what goes on without gradients must not have the graph of what is pending
    empty = 0 in x.shape or any(cut is not None and cut.thin for cut in x.partition.cuts)
    if x.dtype not in TYPES or not 3 <= x.dim() <= 5 or empty:
        return None
    block = dense(x.block, memory_format_of(x.block))
    version = 0 if block.is_inference() else block._version
    return Chain(x, block, version, Links(block.dtype), torch.is_grad_enabled())


def result(chain: Chain, like: Sharded, partition: Partition) -> Sharded:
    """What a rule returns: put off where nobody can change the source unnoticed, else computed."""
    if chain.source.private and chain.wants_gradient:
        return like.will_be(chain, partition)
    return like.like(chain.value(), partition, fresh=True)


def operand(
    x: Sharded, dtype: torch.dtype, room: Room | None = None
) -> tuple[torch.Tensor, Recomputable | None]:
    """The block as a convolution takes it, and how to have it again in the backward pass.

    What is pending is computed in ``dtype`` at once, where there is ``room`` for a halo.
    """
    chain = x.recipe
    if not isinstance(chain, Chain):
        return x.block, None
    if x.pending is None:
        block = x.block
    elif dtype != chain.dtype:
        block = chain.in_room(room).value(dtype)
        x.bypassed = True
    else:
        x.pending = chain.in_room(room)
        block = x.block
    if not chain.recomputable:
        return block, None
    return block, Recomputable((chain.block,), chain.links.rounded(block.dtype))
