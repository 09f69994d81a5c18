"""Describes a machine: its YAML file, shipped or measured, and the times that follow from it.

In reading order: messages, sums and reads, by a few fitted numbers each; the operators of one
number of ranks on a node; the whole machine; its file.
"""

from __future__ import annotations

import logging
import math
import reprlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date as Date
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from hyperslab.errors import MachineError
from hyperslab.planner import calls
from hyperslab.planner.records import Call, LocalOperator, TensorSpec
from hyperslab.util.atomic_files import write_text
from hyperslab.util.documents import MOST_LONG_YAML_CHARACTERS, parse_long_yaml, read_text
from hyperslab.util.optional_libraries import current_versions

if TYPE_CHECKING:  # files are read, and refused, before these are imported
    import numpy as np
    from numpy.typing import NDArray


class MachineSection(BaseModel):
    """Refuses unknown keys, changes and infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copies the section without the properties cached from the old values."""
        copy = super().model_copy(update=update, deep=deep)
        for name in copy.__dict__.keys() - type(self).model_fields.keys():
            del copy.__dict__[name]
        return copy


LinkClass = Literal["device", "node", "network"]
"""Names what joins two ranks: one socket (or devices that are joined directly), one node, or the
network between nodes."""

LINKS: tuple[LinkClass, ...] = get_args(LinkClass)
"""Orders the classes of links, the nearest ranks first."""


class FitResidual(MachineSection):
    """Says how far measured times are from a fit, as a share of them."""

    median: NonNegativeFloat
    worst: NonNegativeFloat


class LinearFit(MachineSection):
    """Fits time linearly in bytes; SR of Oyama et al. 2020, section III-C."""

    up_to: PositiveInt | None = None  # [B] the largest message that it is for; None: any
    latency: NonNegativeFloat  # [s]
    bandwidth: PositiveFloat  # [B/s]
    residual: FitResidual | None = None  # None: published, not measured

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


class PowerFit(MachineSection):
    """Fits log time linearly in log bytes, over ``ranks`` ranks; AR of the same."""

    up_to: PositiveInt | None = None  # [B] the largest sum that it is for; None: any
    scale: PositiveFloat  # [s] for one byte
    exponent: float  # of bytes
    residual: FitResidual | None = None

    def seconds(self, nbytes: float) -> float:
        return self.scale * max(nbytes, 1) ** self.exponent


class AllReduceFits(MachineSection):
    """Holds the fits of measured all-reduces over ``ranks`` ranks of a node, or of whole nodes."""

    ranks: PositiveInt
    pieces: tuple[PowerFit | LinearFit, ...]

    def seconds(self, nbytes: float, ranks: int) -> float:
        """Scales to another number of ranks: what each moves of a sum is 2 (n - 1) / n of it."""
        seconds = fit_for(nbytes, self.pieces).seconds(nbytes)
        return seconds * ((ranks - 1) / ranks) / ((self.ranks - 1) / self.ranks)


class SumsOverNodes(MachineSection):
    """Fits all-reduces over nodes by bytes and by a power of the nodes; AR of the same."""

    scale: PositiveFloat  # [s/B] on one node
    exponent: float  # of nodes

    def seconds(self, nbytes: float, nodes: int) -> float:
        return self.scale * nbytes * nodes**self.exponent


class ReadSpeed(MachineSection):
    """Models reading files: the speed of one rank, and of all on a shared file system."""

    bandwidth: PositiveFloat  # [B/s] of a rank
    total: PositiveFloat | None = None  # [B/s] of all ranks; None: each has its own
    latency: NonNegativeFloat = 0  # [s]
    cached: bool = False  # whether the measured file was in the page cache
    residual: FitResidual | None = None

    def seconds(self, nbytes: float, ranks: int) -> float:
        shared = nbytes * ranks / self.total if self.total else 0.0
        return self.latency + max(nbytes / self.bandwidth, shared)


class HiddenShares(MachineSection):
    """Holds the shares of communication that work hides; the paper assumes 1."""

    halos: float = 1.0
    gradients: float = 1.0
    exchange: float = 1.0  # of the store, which reads ahead


AnyFit = TypeVar("AnyFit", bound=LinearFit | PowerFit)


def fit_for(nbytes: float, pieces: tuple[AnyFit, ...]) -> AnyFit:
    """Chooses the piece of a fit for a message, or a sum, of so many bytes."""
    return next((p for p in pieces if p.up_to is None or nbytes <= p.up_to), pieces[-1])


def ring_or_tree(nbytes: float, ranks: int, line: LinearFit) -> float:
    """Computes the time [s] of an all-reduce whose messages all travel on such a link.

    Ring: 2 (n - 1) messages of 1/n of the bytes. Tree: up and down, 2 log2 n latencies, with the
    bytes travelling in a pipeline. The libraries take whichever is faster.
    """
    if ranks < 2:
        return 0.0
    moved = 2 * nbytes * (ranks - 1) / ranks / line.bandwidth
    ring = 2 * (ranks - 1) * line.latency + moved
    tree = 2 * math.ceil(math.log2(ranks)) * line.latency + 2 * nbytes / line.bandwidth
    return min(ring, tree)


How = Literal["measured", "interpolated", "modelled"]
"""Says where a time is from: the same call, other shapes of it, or the roofline alone."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Holds the estimated time of one call, and where it comes from."""

    seconds: float
    how: How


class PublishedRate(MachineSection):
    """Holds a published rate of a rank's convolutions, by input channels and form of the block.

    Oyama et al. 2020, section V-B: kernels "may not be well-tuned for non-cube domains".
    """

    channels: PositiveInt
    thickness: PositiveFloat  # the least extent of the block over the largest
    rate: PositiveFloat  # [flop/s]


def published_rate(call: Call, rates: Sequence[PublishedRate]) -> float | None:
    """Looks up the rate [flop/s] of a call; None if it is no convolution, or none is known.

    Of the nearest number of channels, interpolated in the logarithms of thickness; outside of the
    published forms that of the nearest.
    """
    at = calls.CONVOLUTION_INPUT.get(call.name)
    if at is None or not rates:
        return None
    x = call.arguments[at]
    assert isinstance(x, TensorSpec)
    channels = min((rate.channels for rate in rates), key=lambda n: abs(math.log(n / x.shape[1])))
    form = math.log(max(min(x.shape[2:]), 1) / max(*x.shape[2:], 1))
    alike = [rate for rate in rates if rate.channels == channels]
    points = sorted((math.log(rate.thickness), math.log(rate.rate)) for rate in alike)
    import numpy as np

    return math.exp(np.interp(form, *np.transpose(points)))


def _valid_call(text: str) -> str:
    calls.parse_call(text)
    return text


def _known_dtypes(names: dict[str, float]) -> dict[str, float]:
    for name in names:
        if name not in calls.DTYPES:
            raise ValueError(f"{name!r} is not a dtype: use {', '.join(calls.DTYPES)}")
    if "float32" not in names:
        raise ValueError("the peak of float32 is missing")
    return names


class Measured(MachineSection):
    """Holds a call that was timed; ``bytes`` are those that it reads and writes."""

    call: Annotated[str, AfterValidator(_valid_call)]
    seconds: PositiveFloat
    flops: NonNegativeFloat = 0
    bytes: NonNegativeFloat = 0

    @cached_property
    def parsed(self) -> Call:
        return calls.read_call(self.call)


class Overhead(MachineSection):
    """Holds the time of Python and launch, beside the operators' own."""

    operator: NonNegativeFloat = 0  # [s] for each operator of a step
    step: NonNegativeFloat = 0  # [s] for each step
    residual: FitResidual | None = None


class Setting(MachineSection):
    """Holds the speeds of one rank while ``ranks`` ranks of ``threads`` threads share a node.

    An operator takes the measured time of an equal call; else it is interpolated between calls of
    one `calls.call_kind` that are like it; else it follows from a published rate of convolutions,
    else the roofline.
    """

    ranks: PositiveInt
    threads: PositiveInt = 1
    flops: Annotated[dict[str, PositiveFloat], AfterValidator(_known_dtypes)]  # [flop/s] at most
    bandwidth: PositiveFloat  # [B/s] of memory
    launch: NonNegativeFloat = 0  # [s] that the smallest operator takes
    overhead: Overhead = Overhead()
    rates: tuple[PublishedRate, ...] = ()  # published, of convolutions that were not measured
    operators: tuple[Measured, ...] = ()

    def estimate(self, operator: LocalOperator) -> Estimate:
        """Estimates how long the operator takes, without Python's overhead beside it."""
        if operator.call not in self._estimates:
            self._estimates[operator.call] = self._estimate(operator)
        return self._estimates[operator.call]

    def roofline_of(self, operator: LocalOperator) -> float:
        """Computes the least time [s] at this setting, a launch included."""
        return self._least(operator.call, operator.total_flops, operator.read + operator.written)

    @cached_property
    def measured(self) -> dict[Call, Measured]:
        """Indexes the measured operators by call."""
        return {entry.parsed: entry for entry in self.operators}

    @cached_property
    def _estimates(self) -> dict[Call, Estimate]:
        return {}

    @cached_property
    def _kinds(self) -> dict[tuple[object, ...], list[calls.TimedCall]]:
        """Groups the measured calls by kind."""
        kinds = defaultdict(list)
        for call, entry in self.measured.items():
            least = self._least(call, entry.flops, entry.bytes)
            timed = calls.call_features(call, least), entry.seconds, least
            kinds[calls.call_kind(call)].append(timed)
        return dict(kinds)

    def _estimate(self, operator: LocalOperator) -> Estimate:
        call = operator.call
        entry = self.measured.get(call)
        if entry is not None:
            return Estimate(entry.seconds, "measured")
        least = self.roofline_of(operator)
        known = self._kinds.get(calls.call_kind(call), ())
        seconds = calls.interpolated_seconds(call, least, known)
        if seconds is not None:
            return Estimate(seconds, "interpolated")
        rate = published_rate(call, self.rates)
        if rate is not None:
            least = max(least, self.launch + operator.total_flops / rate)
        return Estimate(least, "modelled")

    def _least(self, call: Call, flops: float, nbytes: float) -> float:
        dtypes = (str(spec.dtype).removeprefix("torch.") for spec in call.tensors())
        # A file need not have the peak of each dtype; it has that of float32.
        peak = self.flops.get(next(dtypes, "float32"), self.flops["float32"])
        return self.launch + max(flops / peak, nbytes / self.bandwidth)


def entry_of(operator: LocalOperator, seconds: float) -> Measured:
    """Makes the entry of a measured operator in a machine file."""
    return Measured(
        call=calls.write_call(operator.call),
        seconds=float(f"{seconds:.5g}"),  # as many digits as a measurement has
        flops=operator.total_flops,
        bytes=operator.read + operator.written,
    )


FORMAT = 1  # the format of machine files; a later one may give keys another meaning


class Reference(MachineSection):
    """Cites the source of a published number."""

    key: str  # of this file, such as links.network
    text: str  # what the source says
    where: str  # the publication


class Machine(MachineSection):
    """Declares a machine file. Times are in s, sizes in B, speeds in B/s and flop/s."""

    format: int = FORMAT
    name: str
    date: Date  # of the measurement, or of the collection of published numbers
    versions: dict[str, str]  # of what it was measured with: hyperslab, torch, python
    processor: str
    instructions: str = ""  # of the CPU, by which kernels are chosen; "": not known
    note: str = ""  # for the reader
    device: Literal["cpu", "cuda"] = "cpu"  # as torch calls it
    ranks_per_node: PositiveInt
    ranks_per_socket: PositiveInt  # of a CPU socket, or of devices that are joined directly
    memory: PositiveInt  # [B] of each rank
    settings: Annotated[tuple[Setting, ...], Field(min_length=1)]
    links: dict[LinkClass, tuple[LinearFit, ...]] = Field(default_factory=dict)
    node_bandwidth: PositiveFloat | None = None  # [B/s] to the network; None: a link for each rank
    sums: tuple[AllReduceFits, ...] = ()  # of a node, of nodes; none: they follow from links
    node_sums: SumsOverNodes | None = None  # none: sums over nodes follow from links, too
    exchange: PositiveFloat | None = None  # [B/s] of a rank's boxes to other replicas' stores
    copying: PositiveFloat | None = None  # [B/s] from the host to its device
    reserved: NonNegativeInt = 0  # [B] of a device for no tensor: context, buffers, workspace
    reading: ReadSpeed | None = None  # None: not known, reads take no time
    hidden: HiddenShares = HiddenShares()
    sources: tuple[Reference, ...] = ()

    @field_validator("links")
    @classmethod
    def _with_pieces(cls, links: dict[LinkClass, tuple[LinearFit, ...]]) -> object:
        for name, pieces in links.items():
            if not pieces or pieces[-1].up_to is not None:
                raise ValueError(f"the last piece of {name} must be for any size: leave out up_to")
        return links

    @model_validator(mode="after")
    def _one_setting_each(self) -> Machine:
        counts = [setting.ranks for setting in self.settings]
        if len(set(counts)) < len(counts):
            raise ValueError(f"settings are for {counts} ranks: give each number once")
        return self

    @property
    def measured(self) -> bool:
        """Tells if `hyperslab calibrate` wrote the file; if not, its numbers are published ones."""
        return not self.sources

    def setting(self, ranks: int) -> Setting:
        """Returns the setting for so many ranks: those of a node share memory bandwidth."""
        together = min(ranks, self.ranks_per_node)
        settings = sorted(self.settings, key=lambda setting: setting.ranks)
        return next((s for s in settings if s.ranks >= together), settings[-1])

    def at(self, ranks: int) -> Setting | None:
        """Returns the setting of exactly so many ranks on a node, if there is one."""
        return next((setting for setting in self.settings if setting.ranks == ranks), None)

    def link(self, rank: int, peer: int, place: NDArray[np.int64] | None = None) -> LinkClass:
        """Returns the class of link between two ranks.

        They fill sockets and nodes in order, or have a ``place`` each.
        """
        if place is not None:
            rank, peer = map(int, place[[rank, peer]])
        per_node = self.ranks_per_node
        if rank // per_node != peer // per_node:
            return "network"
        here, there = (r % per_node // self.ranks_per_socket for r in (rank, peer))
        return "device" if here == there else "node"

    def partner(self, rank: int, link: LinkClass, ranks: int) -> int | None:
        """Returns a rank's peer while all talk in pairs over links of a class; None: nobody.

        Of eight V100s, four on a node, two of which are joined directly:

        >>> machine = load_machine("lassen-v100")
        >>> [machine.partner(0, link, ranks=8) for link in LINKS], machine.partner(3, "node", 8)
        ([1, 2, 4], 1)
        """
        far = {"device": 1, "node": self.ranks_per_socket, "network": self.ranks_per_node}[link]
        peer = rank + far if rank // far % 2 == 0 else rank - far
        return peer if peer < ranks and self.link(rank, peer) == link else None

    def with_setting(self, setting: Setting) -> Machine:
        """Returns the same machine with another or a new setting of its number of ranks."""
        others = [other for other in self.settings if other.ranks != setting.ranks]
        settings = sorted([*others, setting], key=lambda setting: setting.ranks)
        return self.model_copy(update={"settings": tuple(settings)})

    def joined(self, other: Machine) -> Machine:
        """Adds the settings of a measurement of the same machine on another number of ranks.

        All else is of the one with the most ranks on a node.
        """
        larger = other if other.ranks_per_node > self.ranks_per_node else self
        joined = larger.model_copy(update={"name": self.name, "settings": self.settings})
        for setting in other.settings:
            joined = joined.with_setting(setting)
        return joined

    def message_seconds(self, nbytes: int, link: LinkClass) -> float:
        """Computes one message between two ranks [s]; SR of Oyama et al. 2020, section III-C."""
        pieces = self._pieces(link)
        return fit_for(nbytes, pieces).seconds(nbytes) if pieces else 0.0

    def exchange_seconds(
        self, sizes: Mapping[int, int], rank: int, place: NDArray[np.int64] | None = None
    ) -> float:
        """Computes messages of these ``sizes`` [B] to peers while all ranks send as far [s].

        SR of Oyama et al. 2020, section III-C, but their latencies overlap: the longest counts.
        """
        sent = [self._sent(nbytes, rank, peer, place) for peer, nbytes in sizes.items()]
        return max((latency for latency, _ in sent), default=0.0) + sum(took for _, took in sent)

    def _sent(
        self, nbytes: int, rank: int, peer: int, place: NDArray[np.int64] | None
    ) -> tuple[float, float]:
        """Computes the latency of a message and how long its bytes take the rank's link [s].

        Of a node's ranks as many send out of it as the peer's number is away, and share
        `node_bandwidth`; or as many as have the peer's distance to a rank of another node, where
        ranks do not fill nodes in order but have a ``place`` each.
        """
        link = self.link(rank, peer, place)
        leaving = min(abs(peer - rank), self.ranks_per_node) if link == "network" else 0
        if leaving and place is not None:
            import numpy as np

            node = place // self.ranks_per_node
            peers = np.flatnonzero(node == node[rank]) + peer - rank
            peers = peers[(peers >= 0) & (peers < len(place))]
            leaving = int(np.count_nonzero(node[peers] != node[rank]))
        shared = nbytes * leaving / (self.node_bandwidth or math.inf)
        pieces = self._pieces(link)
        latency = fit_for(nbytes, pieces).latency if pieces else 0.0
        # A message is as fast as its link, or as its share of the node's way out.
        return latency, max(self.message_seconds(nbytes, link) - latency, shared)

    def sum_seconds(self, nbytes: int, ranks: Sequence[int]) -> float:
        """Computes a sum over these ranks, while all others sum over such groups [s]; AR as well.

        Over several nodes: as measured over whole nodes; else within each, then over the nodes on
        the network, where every rank of a node has its share of the bytes, and of
        `node_bandwidth`; or by `node_sums`.
        """
        together, nodes = _spread(ranks, self.ranks_per_node)
        wide = [sums for sums in self.sums if sums.ranks > self.ranks_per_node]
        if nodes > 1 and together == self.ranks_per_node and wide:
            return _nearest(wide, len(ranks)).seconds(nbytes, len(ranks))
        seconds = self._sum_in_node(nbytes, together)
        # What was published or measured of sums over nodes goes before what follows from links.
        if nodes > 1 and self.node_sums is not None:
            return seconds + self.node_sums.seconds(nbytes, nodes)
        pieces = self._pieces("network")
        if nodes > 1 and pieces:
            share = nbytes / together
            across = ring_or_tree(share, nodes, fit_for(share, pieces))
            leaving = share * self.ranks_per_node
            shared = 2 * leaving * (nodes - 1) / nodes / (self.node_bandwidth or math.inf)
            seconds += max(across, shared)
        return seconds

    def read_seconds(self, nbytes: int, ranks: int) -> float:
        """Computes the time [s] in which each of ``ranks`` ranks reads so many bytes at once.

        Mathuriya et al. 2018, equation 1.
        """
        return self.reading.seconds(nbytes, ranks) if self.reading else 0.0

    def offload_seconds(self, nbytes: int, ranks: int) -> float:
        """Computes the time [s] in which a rank moves so many bytes out of its memory, or back.

        From a GPU they go to its host, else to a file, as fast as files are read.
        """
        if self.device == "cpu":
            return self.read_seconds(nbytes, ranks)
        return nbytes / (self.copying or math.inf)

    def _pieces(self, link: LinkClass) -> tuple[LinearFit, ...]:
        """Returns the fits of a class of link, else of the next slower, else of the next faster."""
        at = LINKS.index(link)
        order = [*LINKS[at:], *reversed(LINKS[:at])]
        return next((self.links[name] for name in order if name in self.links), ())

    def _sum_in_node(self, nbytes: int, ranks: int) -> float:
        if ranks < 2:
            return 0.0
        within = [sums for sums in self.sums if sums.ranks <= self.ranks_per_node]
        if within:
            return _nearest(within, ranks).seconds(nbytes, ranks)
        pieces = self._pieces("device" if ranks <= self.ranks_per_socket else "node")
        return ring_or_tree(nbytes, ranks, fit_for(nbytes, pieces)) if pieces else 0.0


def _nearest(sums: Sequence[AllReduceFits], ranks: int) -> AllReduceFits:
    """Finds the measurement over the number of ranks that is nearest."""
    return min(sums, key=lambda one: abs(one.ranks - ranks))


def _spread(ranks: Sequence[int], per_node: int) -> tuple[int, int]:
    """Counts the nodes that some ranks are on, and the most of these ranks on one node."""
    count = len(ranks)
    if ranks[0] % per_node == 0 and ranks[-1] - ranks[0] == count - 1:  # thousands, quickly
        return min(count, per_node), -(-count // per_node)
    on_node = Counter(rank // per_node for rank in ranks)
    return max(on_node.values()), len(on_node)


log = logging.getLogger("hyperslab")

_SHIPPED = files("hyperslab.planner") / "machines"


def shipped_machines() -> list[str]:
    """Lists the names of the shipped machines."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in _SHIPPED.iterdir()
        if entry.name.endswith(".yaml")
    )


def load_machine(name_or_path: str | Path) -> Machine:
    """Loads a shipped machine (``laptop-2core``) or that of a YAML file.

    One that was measured with other versions than these is used with a warning that names them.

    Raises:
        MachineError: there is no such file or name, or it is malformed; names the file and the
            key.
    """
    machine = read_machine(name_or_path)
    if machine.format != FORMAT:
        log.warning(
            "%s has format %s, this hyperslab reads format %d: its numbers may mean other things",
            name_or_path,
            machine.format,
            FORMAT,
        )
    here = current_versions()
    pairs = [
        f"{name} {was} (here {here[name]})"
        for name, was in machine.versions.items()
        if name in here and not same_minor(was, here[name])
    ]
    if pairs and machine.measured:
        words = "the machine file %s was measured with %s\n    measure again: hyperslab calibrate"
        log.warning(words, name_or_path, ", ".join(pairs))
    return machine


def read_machine(name_or_path: str | Path) -> Machine:
    """Reads a machine as `load_machine` does, and warns of nothing.

    It needs no torch, so a command reads the file of its ``--machine`` before it imports torch.
    """
    where = str(name_or_path)
    return _parsed(where, _text_of(where))


def _text_of(where: str) -> str:
    try:
        if where in shipped_machines():
            return (_SHIPPED / f"{where}.yaml").read_text()
        return read_text(Path(where), MOST_LONG_YAML_CHARACTERS)
    except FileNotFoundError:
        raise MachineError(
            f"there is no machine file {where}\n    give the path of a file that `hyperslab "
            f"calibrate` wrote, or a shipped machine: {', '.join(shipped_machines())}"
        ) from None
    except OSError as error:
        raise MachineError(f"cannot read the machine file {where}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise MachineError(f"the machine file {where} is not valid YAML: {error}") from None


@lru_cache(4)
def _parsed(where: str, text: str) -> Machine:
    """Parses half a megabyte of measured calls, which takes half a second, once."""
    try:
        values = parse_long_yaml(text)
    except yaml.YAMLError as error:
        raise MachineError(f"the machine file {where} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise MachineError(f"{where} holds no `key: value` lines, so it is not a machine file")
    if "settings" not in values:
        raise MachineError(f"{where}: 'settings' is missing, so it is not a machine file")
    try:
        return Machine.model_validate(values)
    except ValidationError as error:
        lines = _sentences(error, where)
        if values.get("format", FORMAT) != FORMAT:
            lines.append(f"    its format is not {FORMAT}, which this hyperslab reads")
        raise MachineError("\n".join(lines)) from None


def save_machine(machine: Machine, path: Path) -> None:
    """Writes a machine's file, whole or not at all, as `load_machine` reads it."""
    values = machine.model_dump(mode="json", exclude_none=True)
    text = yaml.dump(values, Dumper=_OneLine, sort_keys=False, width=10**6, allow_unicode=True)
    write_text(path, text)


class _OneLine(yaml.SafeDumper):
    """Writes a mapping of plain values on one line."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
        node = super().represent_mapping(tag, mapping, flow_style)
        scalars = all(isinstance(value, yaml.ScalarNode) for _, value in node.value)
        node.flow_style = scalars and bool(node.value) and len(self.represented_objects) > 1
        return node


def _sentences(error: ValidationError, where: str) -> list[str]:
    lines = []
    keys = [problem["loc"] for problem in error.errors(include_url=False)]
    for problem in error.errors(include_url=False):
        if any(problem["loc"] == key[: len(problem["loc"])] != key for key in keys):
            continue  # it follows from what is wrong inside
        key = ".".join(map(str, problem["loc"]))
        if problem["type"] == "missing":
            lines.append(f"{where}: {key!r} is missing")
        elif problem["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown key {key!r}")
        elif not key:
            lines.append(f"{where}: {problem['msg'].removeprefix('Value error, ')}")
        else:
            what = problem["msg"].removeprefix("Value error, ").replace("Input should", "it should")
            lines.append(f"{where}: bad value {reprlib.repr(problem['input'])} for {key!r}: {what}")
    return lines


def same_minor(a: str, b: str) -> bool:
    """Tells if two versions differ in their patches at most, which do not change kernels."""
    first, second = (number.split("+")[0].split(".")[:2] for number in (a, b))
    return first == second
