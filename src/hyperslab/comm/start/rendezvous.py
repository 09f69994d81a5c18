"""The store at which the ranks meet, or one error that says why there is none."""

from __future__ import annotations

import datetime
import errno
import os
import socket

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hyperslab.comm.start.attempt import agree_on_attempt
from hyperslab.comm.start.deadline import Deadline
from hyperslab.comm.start.variables import RankVariables
from hyperslab.errors import CommError, HyperslabError, reason

RESOLVE = 30.0
"""How long [s] the name of the first rank's machine may be unknown: it may be about to start."""


def meet(place: RankVariables, deadline: Deadline) -> Store:
    """The store of these ranks: the launcher's file, torchrun's, or one that rank 0 opens.

    Raises:
        HyperslabError: MASTER_PORT is taken, or MASTER_ADDR does not resolve.
        CommError: nobody answers there in time.
    """
    limit = datetime.timedelta(seconds=max(deadline.left, 1.0))
    if place.store is not None:
        store: Store = dist.FileStore(place.store, place.size)  # type: ignore[attr-defined]
        store.set_timeout(limit)
        return store
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _client(place, deadline, limit)
        return agree_on_attempt(store, place, deadline, lambda: _client(place, deadline, limit))
    if place.port == 0:
        return dist.HashStore()  # type: ignore[attr-defined]
    if place.rank > 0:
        return _client(place, deadline, limit)
    with _listener(place) as listener:
        return dist.TCPStore(  # type: ignore[attr-defined]
            place.address,
            place.port,
            place.size,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def _client(place: RankVariables, deadline: Deadline, limit: datetime.timedelta) -> Store:
    """Torch tries as long, but says so in pages of its own."""
    _reach(place, deadline)
    return dist.TCPStore(  # type: ignore[attr-defined]
        place.address, place.port, place.size, timeout=limit, wait_for_workers=False
    )


def _reach(place: RankVariables, deadline: Deadline) -> None:
    """Wait until somebody listens there."""
    resolve = Deadline(min(RESOLVE, deadline.left))
    problem: OSError = TimeoutError()

    def reached() -> bool:
        nonlocal problem
        try:
            socket.create_connection((place.address, place.port), max(deadline.left, 0.1)).close()
        except socket.gaierror as error:
            if not resolve.left:
                raise _unknown_host(place, error) from None
            problem = error
        except OSError as error:
            problem = error
        else:
            return True
        return False

    if deadline.poll(reached):
        return
    if isinstance(problem, socket.gaierror):
        raise _unknown_host(place, problem)
    raise CommError(
        f"rank {place.rank} of {place.size} does not reach rank 0 at {place.where} within "
        f"{deadline.seconds:g} s: {reason(problem)}\n"
        "    see whether rank 0 was started, and whether the two are those of its machine"
    )


def _listener(place: RankVariables) -> socket.socket:
    """At MASTER_ADDR alone; everywhere where that is a name of this machine for others only."""
    try:
        found = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _unknown_host(place, error) from None
    family, _, _, _, address = found[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=4096)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise _taken(place, error) from None
    try:
        return socket.create_server(("", place.port), backlog=4096)
    except OSError as error:
        raise _taken(place, error) from None


def _taken(place: RankVariables, error: OSError) -> HyperslabError:
    return HyperslabError(
        f"rank 0 cannot listen at {place.where}: {reason(error)}\n"
        "    another program or run may have that port: give all ranks another MASTER_PORT"
    )


def _unknown_host(place: RankVariables, error: OSError) -> HyperslabError:
    return HyperslabError(
        f"MASTER_ADDR={place.address!r} is the name of no machine: {error.strerror}\n"
        "    give all ranks the name or the address of rank 0's machine"
    )
