"""Starts trainings on ranks of many nodes that something else has started for a study.

Under ``srun``, ``jsrun`` or ``torchrun`` every task runs the same command: `hyperslab scale` or
`sweep`. All of them serve: they start the processes that they are told to start. The study itself
runs on the main rank, on a thread beside, and hands out work through a store.

In reading order: `run_rank`, the process of one rank of a training; `Mail`, by which ranks tell
each other of tasks, and none but they; `serve`, which does tasks; `Crew`, which hands them out;
`Team`, the ranks of a crew that run one training after the other; `with_crew`, which puts them
together.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import itertools
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from hyperslab.comm import launchers
from hyperslab.comm.rendezvous import Deadline, answer_roll_call, meet, settle
from hyperslab.errors import CommError, HyperslabError, RecipeError, reason, system_errors_as
from hyperslab.launch import failures
from hyperslab.launch.supervisor import LAUNCHER_VARIABLE, Supervisor, devices_environment, finish
from hyperslab.util.optional_libraries import current_versions
from hyperslab.util.signals import StopRequest

T = TypeVar("T")

MEET_LIMIT = 600.0  # [s] that ranks wait for each other at the start
LOOK = 0.1  # pause [s] between two looks for a task or an answer
BEAT = 5.0  # pause [s] between two signs of life of a rank
SILENCE = 60.0  # [s] that a rank may give none
FAREWELL = 10.0  # [s] that the main rank, which keeps the store, waits for the others to leave


def run_rank(
    arguments: Sequence[str],
    variables: Mapping[str, str],
    devices: Sequence[int],
    folder: Path,
    *,
    seconds: float,
    silent: bool,
) -> failures.RankEnd:
    """Run ``python arguments...`` as one rank of a training, and return how it has ended.

    ``variables`` go before those of this process. ``devices``: of those that the task sees, the
    numbers of those that the training's ranks on this node have. The rank's output goes into
    ``folder``.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC_") and name != launchers.STORE_VARIABLE
    }
    environment |= {**variables, LAUNCHER_VARIABLE: str(os.getpid())}
    environment |= devices_environment(devices)
    with StopRequest().listening() as stop:
        supervisor = Supervisor(stop, limit=seconds, patience=seconds)
        finish(supervisor.run(arguments, [folder], silent=silent, environments=[environment]))
    return replace(supervisor.ends[0], rank=int(variables["RANK"]))


def free_address(main: str, port: int) -> tuple[str, int]:
    """Find where others reach this machine, as it reaches the main rank, and a port free there."""
    with socket.socket(type=socket.SOCK_DGRAM) as towards:
        towards.connect((main, port))
        address = str(towards.getsockname()[0])
    while True:
        found = secrets.choice(launchers.JOB_PORTS)  # none that the system gives by itself
        with suppress(OSError), socket.create_server((address, found)):
            return address, found


class Mail:
    """Leaves Python's objects in a store for other ranks, which read none but those of this run.

    Objects are pickles, and reading one runs what is in it; anybody who reaches the store may write
    there. So each word is signed, under its name, with a key that lies in a file of the folder that
    all ranks share, which its owner alone can read.
    """

    def __init__(self, store: Store, key: bytes) -> None:
        self.store = store
        self._key = key

    @classmethod
    def among(
        cls, store: Store, place: launchers.RankVariables, folder: Path, deadline: Deadline
    ) -> Mail:
        """Agree on a key by a file in ``folder``, which does not stay.

        Raises:
            CommError: the ranks do not see one folder.
            RecipeError: it cannot be written, or the file is not this user's alone.
        """
        if place.rank == 0:
            key = secrets.token_bytes(32)
            path = folder / f".crew-{secrets.token_hex(8)}"
            with system_errors_as(RecipeError, f"cannot write into {folder}"):
                folder.mkdir(parents=True, exist_ok=True)
                with os.fdopen(
                    os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
                ) as f:
                    f.write(key)
            store.set("key", path.name)
            deadline.poll(lambda: store.add("key was read", 0) == place.size - 1)
            path.unlink()
            return cls(store, key)
        deadline.poll(lambda: store.check(["key"]))
        path = folder / Path(store.get("key").decode()).name
        if not deadline.poll(path.exists):
            raise CommError(f"rank {place.rank} does not see the file of rank 0 in {folder}")
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            if state.st_uid != os.geteuid() or state.st_mode & 0o077:
                raise RecipeError(f"{path} belongs to another user, or is open to others")
            key = file.read()
        store.add("key was read", 1)
        return cls(store, key)

    def post(self, name: str, value: object) -> None:
        words = pickle.dumps(value)
        self.store.set(name, self._signature(name, words).hex() + words.hex())

    def fetch(self, name: str) -> Any:
        """Read it; raises CommError where it is none of this run's."""
        text = bytes.fromhex(self.store.get(name).decode())
        size = hashlib.sha256().digest_size
        if not hmac.compare_digest(text[:size], self._signature(name, text[size:])):
            raise CommError(f"somebody else has written {name!r} into the store of this run")
        return pickle.loads(text[size:])

    def _signature(self, name: str, words: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + words, "sha256")


def serve(mail: Mail, rank: int) -> None:
    """Do the tasks of this rank, one after the other, until it is dismissed.

    Raises:
        CommError: the main rank has ended.
    """
    with _beating(mail.store, rank):
        try:
            for number in itertools.count():
                while not mail.store.check([f"task {rank} {number}"]):
                    time.sleep(LOOK)
                task = mail.fetch(f"task {rank} {number}")
                if task is None:
                    return
                mail.post(f"answer {rank} {number}", _outcome(task, rank))
        except RuntimeError as error:  # of the store: those of tasks are answers
            raise CommError(f"rank {rank} lost contact with rank 0, which has ended") from error


def _outcome(task: Callable[[], object], rank: int) -> tuple[object, HyperslabError | None]:
    """Return what a task returns, or the error that it raises."""
    try:
        return task(), None
    except HyperslabError as error:
        return None, error
    except Exception as error:
        return None, HyperslabError(f"rank {rank} says: {reason(error)}")


@contextmanager
def _beating(store: Store, rank: int) -> Iterator[None]:
    """Give signs of life within it; where the store has gone, end what runs here."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.is_set():
            try:
                store.add(f"beat {rank}", 1)
            except RuntimeError:
                if not ended.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)
                return
            ended.wait(BEAT)

    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        yield
    finally:
        ended.set()
        beating.join(FAREWELL)  # see `with_crew`


class Crew:
    """Hands tasks to ranks; each has its address, its node and its number on that."""

    def __init__(self, mail: Mail, place: launchers.RankVariables) -> None:
        self.size = place.size
        self._free_address = partial(free_address, place.address, place.port)
        self._mail = mail
        self._given = [0] * place.size
        self._beats: dict[int, tuple[int, float]] = {}  # count, and since when
        hosts = mail.store.multi_get([f"node {rank}" for rank in range(place.size)])
        self.nodes = [host.decode() for host in hosts]
        self._local = [self.nodes[:rank].count(node) for rank, node in enumerate(self.nodes)]

    def give(self, rank: int, task: Callable[[], object] | None) -> None:
        """Let a rank do a task, after those that it was given before."""
        self._mail.post(f"task {rank} {self._given[rank]}", task)
        self._given[rank] += 1

    def answer(self, rank: int) -> Any:
        """Wait for what a rank's last task returned.

        Raises:
            HyperslabError: what it raised.
            CommError: the rank gives no sign of life.
        """
        while not self.has_done(rank):
            time.sleep(LOOK)
        value, error = self._mail.fetch(self._answer_key(rank))
        if error is not None:
            raise error
        return value

    def _answer_key(self, rank: int) -> str:
        return f"answer {rank} {self._given[rank] - 1}"

    def has_done(self, rank: int) -> bool:
        """Tell whether a rank has done its last task; raises where it gives no sign of life."""
        if self._mail.store.check([self._answer_key(rank)]):
            return True
        now = time.monotonic()
        beats = self._mail.store.add(f"beat {rank}", 0)
        known, since = self._beats.get(rank, (-1, now))
        self._beats[rank] = (beats, since if beats == known else now)
        if now - self._beats[rank][1] > SILENCE:
            raise CommError(f"rank {rank}, on {self.nodes[rank]}, does not answer")
        return False

    def map(
        self, function: Callable[..., T], tasks: Sequence[tuple[Any, ...]]
    ) -> Generator[T, None, None]:
        """Yield what ``function`` returns for each task, as they end, on whatever rank is free.

        Raises:
            HyperslabError: what the function raised; the tasks that were begun end.
        """
        waiting = deque(tasks)
        free = [*range(self.size)]
        busy: set[int] = set()
        while waiting or busy:
            while waiting and free:
                rank = free.pop(0)
                self.give(rank, partial(function, *waiting.popleft()))
                busy.add(rank)
            for rank in [rank for rank in busy if self.has_done(rank)]:
                busy.remove(rank)
                free.append(rank)
                yield self.answer(rank)
            time.sleep(LOOK)

    def teams(self, ranks: int) -> list[Team]:
        """Divide the ranks into teams of so many; the rest, fewer than a team, does nothing."""
        firsts = range(0, self.size - ranks + 1, ranks)
        return [Team(self, tuple(range(first, first + ranks))) for first in firsts]

    def places(self, members: Sequence[int]) -> list[tuple[dict[str, str], tuple[int, ...]]]:
        """Return a training's variables on each of these ranks, and its devices there."""
        self.give(members[0], self._free_address)
        address, port = self.answer(members[0])
        found = []
        for number, member in enumerate(members):
            here = [one for one in members if self.nodes[one] == self.nodes[member]]
            variables = {
                "RANK": str(number),
                "WORLD_SIZE": str(len(members)),
                "LOCAL_RANK": str(here.index(member)),
                "LOCAL_WORLD_SIZE": str(len(here)),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                launchers.RUN_VARIABLE: f"training {self._given[members[0]]} of rank {members[0]}",
            }
            found.append((variables, tuple(self._local[one] for one in here)))
        return found


@dataclass(frozen=True)
class Team:
    """Holds the ranks of a crew that run one training after the other."""

    crew: Crew
    members: tuple[int, ...]

    def start_training(
        self, ranks: int, words: Sequence[str], logs: Path, *, seconds: float, silent: bool = False
    ) -> Iterator[None]:
        """Run ``hyperslab words...`` on the first ``ranks`` members, and yield until its end."""
        name = f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}-{self.members[0]}"
        members = self.members[:ranks]
        folders = [logs.absolute() / name / str(number) for number in range(ranks)]
        arguments = ("-m", "hyperslab", *words)
        for member, folder, (variables, devices) in zip(
            members, folders, self.crew.places(members), strict=True
        ):
            task = partial(run_rank, arguments, variables, devices, folder)
            self.crew.give(member, partial(task, seconds=seconds, silent=silent))
        while not all(self.crew.has_done(member) for member in members):
            yield
        ends = [self.crew.answer(member) for member in members]
        failed = {end.rank: end for end in ends if end.exitcode != 0}
        if failed:
            output = {rank: folder / "stderr.log" for rank, folder in enumerate(folders)}
            raise failures.explain_failures(failed, output)


def with_crew(study: Callable[[Crew], T], folder: Path) -> T | None:
    """Serve, and on the main rank run ``study`` beside and return what it does; else None.

    ``folder`` is one that all ranks share, which is made where there is none.

    Raises:
        CommError: a rank did not come, or the main one has ended.
        Exception: what ``study`` raised, on the main rank.
    """
    place = launchers.read_variables(os.environ)
    assert place is not None
    deadline = Deadline(MEET_LIMIT)
    facts = {"command": sys.argv[1:], "versions": current_versions()}
    met, _ = answer_roll_call(meet(place, deadline), place, facts, deadline)
    store = PrefixStore("crew", met)
    node = f"{socket.gethostname()} {free_address(place.address, place.port)[0]}"
    launchers.forget_launcher(os.environ)  # what a study looks at it does alone
    store.set(f"node {place.rank}", node)
    mail = Mail.among(store, place, folder.absolute(), deadline)
    if place.rank > 0:
        serve(mail, place.rank)
        store.add("left", 1)
        return None

    outcome: Future[T] = Future()

    def run() -> None:
        crew = Crew(mail, place)
        settle(outcome, partial(study, crew))
        for rank in range(crew.size):
            crew.give(rank, None)  # dismissed

    beside = threading.Thread(target=run, daemon=True)
    beside.start()
    serve(mail, 0)
    Deadline(FAREWELL).poll(lambda: store.add("left", 0) == place.size - 1)
    # It may still be in the store's C++, which aborts a process that ends meanwhile.
    beside.join(FAREWELL)
    return outcome.result()
