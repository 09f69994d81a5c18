"""Sums over ranks of one machine, through memory that they share.

Legend: every rank has an *area* in which it shows the others its part of a sum; a *chunk* is what
half an area holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from hyperslab.comm.shared_memory.pairs import TOKEN, RankPairs
from hyperslab.comm.shared_memory.segment import CACHE_LINE, Segment
from hyperslab.errors import CommError

SMALL = 16 << 10  # [B] up to which every rank adds up everything by itself
AREAS = 16 << 20  # [B] of all areas together
LARGEST_AREA = 4 << 20  # [B] of one: two chunks that the processor's cache holds
PIECE = 1 << 16  # numbers that are added up at once: they stay in the processor's cache
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Shown:
    """``parts``: one of every rank, flat and as large as the others. The numbers of those ranks
    that ``terms`` names are added up; others' are zero.
    """

    parts: Sequence[torch.Tensor]
    terms: Sequence[int]


class SharedSums:
    """Sums in place; every rank gets the same bits, because one rank adds up each element, or all
    do in the order of the ranks. Half precision is added up in float32.
    """

    def __init__(self, segment: Segment, rank: int, areas: torch.Tensor, pairs: RankPairs) -> None:
        """``areas`` are bytes, (ranks, bytes of one)."""
        self.rank = rank
        self.chunk = areas.shape[1] // 2  # [B]
        self._segment = segment
        self._areas = areas
        self._pairs = pairs
        self._views: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._readers: list[int] = []  # who may still read this rank's area

    def all_reduce(self, x: torch.Tensor, ranks: Sequence[int], what: str, scale: float) -> None:
        """``scale`` times the sum over ``ranks``, in place of a contiguous tensor.

        Raises:
            CommError: another rank adds up something of another size, or see `Segment.wait`.
        """
        others = [rank for rank in ranks if rank != self.rank]
        self._may_write(what)
        self._segment.numbers[self.rank] = x.nbytes
        if x.nbytes <= SMALL:
            self._sum_all(x, ranks, others, what, scale)
        else:
            _Shares(self, x.view(-1), ranks, others, scale).run(what)
        self._readers = others
        for rank in others:
            self._pairs.post(self.rank, rank, TOKEN)

    def average_shown(self, sums: Iterable[Shown], what: str, *, nbytes: int) -> None:
        """The mean over all ranks, in place of tensors that all of them map.

        A number is read where it was written, and its mean is written where it belongs; of every
        sum each rank that has a term does so for its share of the numbers.

        Args:
            sums: the same ones on all ranks; asked for when all have met, so that a generator can
                look at what the others show.
            what: for errors.
            nbytes: of the memory that they are in.

        Raises:
            CommError: see `all_reduce`.
        """
        others = [rank for rank in range(len(self._areas)) if rank != self.rank]
        self._may_write(what)
        self._segment.numbers[self.rank] = nbytes
        self.meet(others, what)
        self.check(others, nbytes, what)
        for shown in sums:
            if self.rank in shown.terms:
                _average(shown, self.rank)
        self.meet(others, what)

    def _sum_all(
        self, x: torch.Tensor, ranks: Sequence[int], others: list[int], what: str, scale: float
    ) -> None:
        """1. Show the own part, 2. add up everybody's."""
        parts = self._small_views(x)
        x = x.view(-1)
        parts[self.rank].copy_(x)
        self.meet(others, what)
        self.check(others, x.nbytes, what)
        _add_up([parts[rank] for rank in ranks], x, scale)

    def _small_views(self, x: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' areas, as far as ``x`` fills them."""
        key = (x.numel(), x.dtype)
        if key not in self._views:
            with torch.inference_mode(False):  # or they could not be written to outside that mode
                self._views[key] = [area[: x.nbytes].view(x.dtype) for area in self._areas]
        return self._views[key]

    def shown(self, rank: int, number: int, begin: int, like: torch.Tensor) -> torch.Tensor:
        """What a rank shows from a byte of a chunk on; two chunks take turns in an area."""
        begin += number % 2 * self.chunk
        return self._areas[rank, begin : begin + like.nbytes].view(like.dtype)

    def meet(self, others: Sequence[int], what: str) -> None:
        """All have shown what they have to show."""
        for rank in others:
            self._pairs.post(self.rank, rank, TOKEN)
        for rank in others:
            self._pairs.wait(rank, self.rank, TOKEN, rank, what)

    def check(self, others: Sequence[int], nbytes: int, what: str) -> None:
        """Ranks that are at different places of a program must not take each other's numbers."""
        for rank in others:
            check_size(self.rank, rank, nbytes, self._segment.numbers[rank], what)

    def _may_write(self, what: str) -> None:
        """Wait until nobody reads what the own area held."""
        while self._readers:
            reader = self._readers[-1]
            self._pairs.wait(reader, self.rank, TOKEN, reader, what)
            self._readers.pop()


class _Shares:
    """One large sum, chunk by chunk; of each every rank adds up its share.

    Steps of a chunk: 1. show the others their shares of the own numbers, 2. add up the own share of
    everybody's and show it, 3. take the others' shares. All meet after each. While a rank is at
    step 2 of one chunk it does step 1 of the next, so there is one meeting a chunk. A share always
    has the same place in a chunk, also in the last one: what a rank writes at step 1 is never where
    others still read at step 3 of the chunk before the last.
    """

    def __init__(
        self,
        sums: SharedSums,
        x: torch.Tensor,
        ranks: Sequence[int],
        others: Sequence[int],
        scale: float,
    ) -> None:
        self.sums = sums
        self.nbytes = x.nbytes
        self.others = others
        self.scale = scale
        place = sums.chunk // len(ranks) // CACHE_LINE * CACHE_LINE  # [B] of a share
        self.places = {rank: i * place for i, rank in enumerate(ranks)}
        chunks = x.split(place // x.element_size() * len(ranks))
        self.shares = [
            dict(zip(ranks, chunk.tensor_split(len(ranks)), strict=True)) for chunk in chunks
        ]

    def run(self, what: str) -> None:
        self._show(0)
        self.sums.meet(self.others, what)
        self.sums.check(self.others, self.nbytes, what)
        for number in range(len(self.shares)):
            self._add_up(number)
            if number + 1 < len(self.shares):
                self._show(number + 1)
            self.sums.meet(self.others, what)
            self._take(number)

    def _show(self, number: int) -> None:
        for rank in self.others:
            share = self.shares[number][rank]
            shown = self.sums.shown(self.sums.rank, number, self.places[rank], share)
            if self.scale == 1.0 or share.dtype in _HALF:
                shown.copy_(share)
            else:
                torch.mul(share, self.scale, out=shown)

    def _add_up(self, number: int) -> None:
        me = self.sums.rank
        own = self.shares[number][me]
        at = self.places[me]
        terms = [self.sums.shown(rank, number, at, own) for rank in self.others]
        total = self.sums.shown(me, number, at, own)
        if own.dtype in _HALF:
            _add_up([own, *terms], total, self.scale)
        else:  # the others' are scaled already
            alpha = {} if self.scale == 1.0 else {"alpha": self.scale}
            torch.add(terms[0], own, **alpha, out=total)
            for term in terms[1:]:
                total.add_(term)
        own.copy_(total)

    def _take(self, number: int) -> None:
        for rank in self.others:
            share = self.shares[number][rank]
            share.copy_(self.sums.shown(rank, number, self.places[rank], share))


def area_bytes(size: int) -> int:
    """Of each of so many ranks' areas [B]."""
    return max(2 * SMALL, min(LARGEST_AREA, AREAS // size) // 4096 * 4096)


def check_size(rank: int, peer: int, expected: int, found: int, what: str) -> None:
    """Raises:
    CommError: a rank shows something of another size than this one expects.
    """
    if found != expected:
        raise CommError(
            f"rank {rank} expected {expected} B from rank {peer} during {what} but "
            f"got {found} B\n    run the same operations in the same order on every rank"
        )


def _average(shown: Shown, rank: int) -> None:
    """A rank's share of the numbers: the sum over the terms by the number of ranks, everywhere."""
    places = [rank, *(term for term in shown.terms if term != rank)]
    places += [place for place in range(len(shown.parts)) if place not in places]
    share = shown.terms.index(rank)
    shares = [shown.parts[place].tensor_split(len(shown.terms))[share] for place in places]
    for pieces in zip(*(part.split(PIECE) for part in shares), strict=True):
        own, *copies = pieces
        terms = copies[: len(shown.terms) - 1]
        if own.dtype in _HALF:
            own.copy_(_total([own, *terms]).mul_(1 / len(places)))
        else:
            for term in terms:
                own.add_(term)
            own.mul_(1 / len(places))
        for copy in copies:
            copy.copy_(own)


def _add_up(terms: Sequence[torch.Tensor], out: torch.Tensor, scale: float) -> None:
    """``out`` may be one of the terms only where it is of half precision."""
    if out.dtype not in _HALF:
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out.add_(term)
        if scale != 1.0:
            out.mul_(scale)
        return
    total = _total(terms)
    out.copy_(total if scale == 1.0 else total.mul_(scale))


def _total(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    wide = torch.float32 if terms[0].dtype in _HALF else terms[0].dtype
    total = terms[0].to(wide, copy=True)
    for term in terms[1:]:
        total += term.to(wide)
    return total
