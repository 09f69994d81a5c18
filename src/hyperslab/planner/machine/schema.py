"""Describes a machine: its YAML file, shipped or measured, and the times that follow from it.

`Machine` is the schema of the file, with the time of a message, an all-reduce and a read;
`load_machine` reads a shipped machine by its name or another one by its path.
"""

from __future__ import annotations

import logging
import math
import reprlib
from collections import Counter
from collections.abc import Sequence
from datetime import date as Date
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from hyperslab.errors import MachineError
from hyperslab.planner.machine.links import (
    LINKS,
    AllReduceFits,
    HiddenShares,
    LinearFit,
    LinkClass,
    MachineSection,
    Placement,
    ReadSpeed,
    fit_for,
    ring_or_tree,
)
from hyperslab.planner.machine.operator_times import Setting
from hyperslab.util.atomic_files import write_text
from hyperslab.util.documents import MOST_LONG_YAML_CHARACTERS, parse_long_yaml, read_text
from hyperslab.util.optional_libraries import current_versions

FORMAT = 1
"""Numbers the format of machine files; a later one may give keys another meaning."""


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
    note: str = ""  # for the reader
    device: str = "cpu"  # as torch calls it
    ranks_per_node: PositiveInt
    ranks_per_socket: PositiveInt  # of a CPU socket, or of devices that are joined directly
    memory: PositiveInt  # [B] of each rank
    settings: Annotated[tuple[Setting, ...], Field(min_length=1)]
    links: dict[LinkClass, tuple[LinearFit, ...]] = Field(default_factory=dict)
    node_bandwidth: PositiveFloat | None = None  # [B/s] to the network; None: a link for each rank
    sums: tuple[AllReduceFits, ...] = ()  # none: all-reduces follow from links
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

    def link(self, rank: int, peer: int) -> LinkClass:
        """Returns the class of link between two ranks, which fill sockets and nodes in order."""
        per_node = self.ranks_per_node
        ranks = max(rank, peer) + 1
        return Placement(ranks, per_node, self.ranks_per_socket).link(rank, peer)

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

    @property
    def missing_links(self) -> list[LinkClass]:
        """Lists the classes without numbers in the file; the nearest class stands in for them."""
        return [name for name in LINKS if name not in self.links]

    def message_seconds(self, nbytes: int, link: LinkClass) -> float:
        """Computes one message between two ranks [s]; SR of Oyama et al. 2020, section III-C."""
        pieces = self._pieces(link)
        return fit_for(nbytes, pieces).seconds(nbytes) if pieces else 0.0

    def send_seconds(self, nbytes: int, rank: int, peer: int) -> float:
        """Computes a message while all other ranks send as far [s]; SR as well.

        Of a node's ranks as many send out of it as the peer's number is away, and share
        `node_bandwidth`.
        """
        link = self.link(rank, peer)
        leaving = min(abs(peer - rank), self.ranks_per_node) if link == "network" else 0
        shared = nbytes * leaving / (self.node_bandwidth or math.inf)
        return max(self.message_seconds(nbytes, link), self.message_seconds(0, link) + shared)

    def all_reduce_seconds(self, nbytes: int, ranks: int) -> float:
        """Computes a sum over the first ``ranks`` ranks, all of them waiting [s]; AR as well."""
        return self.sum_seconds(nbytes, range(ranks))

    def sum_seconds(self, nbytes: int, ranks: Sequence[int]) -> float:
        """Computes a sum over these ranks, while all others sum over such groups [s]; AR as well.

        Over several nodes: within each, then over the nodes on the network, where every rank of a
        node has its share of the bytes, and of `node_bandwidth`.
        """
        together, nodes = _spread(ranks, self.ranks_per_node)
        seconds = self._sum_in_node(nbytes, together)
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

    def _pieces(self, link: LinkClass) -> tuple[LinearFit, ...]:
        """Returns the fits of a class of link, else of the next slower, else of the next faster."""
        at = LINKS.index(link)
        order = [*LINKS[at:], *reversed(LINKS[:at])]
        return next((self.links[name] for name in order if name in self.links), ())

    def _sum_in_node(self, nbytes: int, ranks: int) -> float:
        if ranks < 2:
            return 0.0
        if not self.sums:
            pieces = self._pieces("device" if ranks <= self.ranks_per_socket else "node")
            return ring_or_tree(nbytes, ranks, fit_for(nbytes, pieces)) if pieces else 0.0
        nearest = min(self.sums, key=lambda sums: abs(sums.ranks - ranks))
        seconds = fit_for(nbytes, nearest.pieces).seconds(nbytes)
        # What each rank moves of a sum is 2 (n - 1) / n of its bytes.
        return seconds * ((ranks - 1) / ranks) / ((nearest.ranks - 1) / nearest.ranks)


def _spread(ranks: Sequence[int], per_node: int) -> tuple[int, int]:
    """Counts the nodes that some ranks are on, and the most of these ranks on one node."""
    count = len(ranks)
    if ranks[0] % per_node == 0 and ranks[-1] - ranks[0] == count - 1:  # thousands, quickly
        return min(count, per_node), -(-count // per_node)
    on_node = Counter(rank // per_node for rank in ranks)
    return max(on_node.values()), len(on_node)


log = logging.getLogger("hyperslab")

_SHIPPED = files("hyperslab.planner.machine") / "shipped"


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
    where = str(name_or_path)
    values = _read_values(where)
    if values.get("format", FORMAT) != FORMAT:
        log.warning(
            "%s has format %s, this hyperslab reads format %d: its numbers may mean other things",
            where,
            values["format"],
            FORMAT,
        )
    try:
        machine = Machine.model_validate(values)
    except ValidationError as error:
        raise MachineError("\n".join(_sentences(error, where))) from None
    _compare_versions(machine, where)
    return machine


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


def _read_values(where: str) -> dict[str, Any]:
    shipped = where in shipped_machines()
    try:
        own = _SHIPPED / f"{where}.yaml"
        text = own.read_text() if shipped else read_text(Path(where), MOST_LONG_YAML_CHARACTERS)
        values = parse_long_yaml(text)
    except FileNotFoundError:
        raise MachineError(
            f"there is no machine file {where}\n    give the path of a file that `hyperslab "
            f"calibrate` wrote, or a shipped machine: {', '.join(shipped_machines())}"
        ) from None
    except OSError as error:
        raise MachineError(f"cannot read the machine file {where}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise MachineError(f"the machine file {where} is no YAML: {error}") from None
    if not isinstance(values, dict):
        raise MachineError(f"{where} holds no `key: value` lines, so it is no machine file")
    return values


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
            what = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{where}: bad value {reprlib.repr(problem['input'])} for {key!r}: {what}")
    return lines


def _compare_versions(machine: Machine, where: str) -> None:
    here = current_versions()
    pairs = [
        f"{name} {was} (here {here[name]})"
        for name, was in machine.versions.items()
        if name in here and not same_minor(was, here[name])
    ]
    if pairs and machine.measured:
        log.warning(
            "the machine file %s was measured with %s\n    measure again: hyperslab calibrate",
            where,
            ", ".join(pairs),
        )


def same_minor(a: str, b: str) -> bool:
    """Tells if two versions differ in their patches at most, which do not change kernels."""
    first, second = (number.split("+")[0].split(".")[:2] for number in (a, b))
    return first == second
