"""The Store through which the workers of a job find each other.

Rank 0 opens it at the address of ``init_method`` and the others connect to it, as with
``torch.distributed.rendezvous``. But here rank 0 does not wait for the workers in C++, where Ctrl-C would have no
effect. ``members`` waits for the workers.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import ParseResult, parse_qs, urlparse

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError
from torch.distributed.rendezvous import (
    _get_use_libuv_from_query_dict,
    _query_to_dict,
    _rendezvous_helper,
    _torchelastic_use_agent_store,
)

from torch_ucx_rpc._bootstrap.deadline import Deadline
from torch_ucx_rpc._bootstrap.listener import await_listener, await_name, is_this_host
from torch_ucx_rpc.errors import JoinFailed, JoinTimedOut

T = TypeVar("T")

# The beginning of torch's messages, which programs and tests may look for.
_START = "Error initializing torch.distributed using {}:// rendezvous:"

# A hint for users of groups without a size.
STORE_ENDS = (
    " A group without a world_size can be joined as long as its Store exists, and this Store ends with the process of "
    "rank 0. For later joins use a Store outside of that process: torchrun's, or a file, init_method='file:///path'."
)

# An idle Store answers a new connection within this time. If a port does not answer, it is most likely not a Store's.
_ANSWER_S = 10.0
# A busy Store needs longer. torchrun's Store looks up the host name of each client, and a DNS server that does not
# answer costs 5 s or more. (Stores of this package look up no names.)
_LONGEST_ANSWER_S = 300.0

# The end of the process waits this long for requests to a Store that are still under way.
_LAST_WAIT_S = 10.0

# The key of the job's name, in a Store of `open_job_store`.
_JOB = "torch_ucx_rpc/job"

_NO_LIMIT_S = 20 * 24 * 3600

# Keeps the Store of this process's last group alive. When rank 0 opens the next Store at the same port, faster workers
# may be connected already, so the old server must serve on. (The TCPStores of one process share the server of a port.)
_kept: tuple[object, Store] | None = None


def create_store(init_method: str, rank: int, world_size: int | None, timeout: float) -> Store:
    """Open or join the job's Store, which rank 0 hosts, unless torchrun does.

    Args:
        init_method: a URL; all but ``env://`` and ``tcp://host:port`` go to ``torch.distributed.rendezvous``.
        world_size: None for a group without a size.
        timeout: seconds to wait for rank 0 to open the Store; 0 is no limit.

    Raises ValueError for an incomplete URL or incomplete variables, JoinFailed if there is no Store or its port is in
    use.
    """
    global _kept
    url = urlparse(init_method)
    if {"rank", "world_size"} & parse_qs(url.query).keys():
        raise ValueError(f"the init_method {init_method} cannot give rank or world_size: pass them to init_rpc.")
    iterator: Iterator[tuple[Store, int, int]] | None = None
    store: Store
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if url.scheme in ("env", "tcp"):
        host, port, use_libuv = _store_address(url)
        store = _create_tcp_store(host, port, use_libuv, rank, world_size, Deadline(timeout))
        outlives_attempts = _torchelastic_use_agent_store()
    else:
        if url.scheme == "file":
            _check_folder(url)
        # Some handlers clean up when their generator is collected, so it must live as long as the Store.
        iterator = _rendezvous_helper(init_method, rank, world_size)
        store, _, _ = next(iterator)
        # A group without a size forgets its dead members, and may contain workers of other jobs.
        outlives_attempts = world_size is not None and attempt != "0"
    if outlives_attempts and attempt:
        # After a restart of the workers, torchrun's Store or a file still has all entries of the previous attempt.
        store = PrefixStore(f"/worker/attempt_{attempt}", store)
    _limit_waits(store, timeout)
    _kept = (iterator, store)
    return store


def _limit_waits(store: Store, timeout: float) -> None:
    # To a TCPStore 0 means "do not wait at all", and its milliseconds must fit into an int.
    store.set_timeout(timedelta(seconds=timeout or _NO_LIMIT_S))


def _check_folder(url: ParseResult) -> None:
    """Raise ValueError if the file's folder is missing: torch's FileStore would wait minutes for it, and ignore
    Ctrl-C. A folder in place of the file is refused too."""
    if url.path and Path(url.path).is_dir():
        raise ValueError(f"{_START.format('file')} {url.path} is a folder; it must be the path of a file in a folder.")
    folder = Path(url.path).parent
    if not folder.is_dir():
        raise ValueError(
            f"{_START.format('file')} there is no folder {folder} on {socket.gethostname()}: the file must be on a "
            f"file system that all workers see, in a folder that exists."
        )


def check_rank(init_method: str, rank: int) -> int:
    """Return the rank of a worker of a group without a size. If it is missing (-1), the variable RANK has it."""
    url = urlparse(init_method)
    if rank >= 0:
        return rank
    if url.scheme != "env":
        raise ValueError(f"{_START.format(url.scheme)} rank parameter missing: pass rank to init_rpc.")
    number = os.environ.get("RANK", "")
    if not number.isdecimal():
        problem = (
            f"RANK={number} is not a number from 0 on" if number else "environment variable RANK expected, but not set"
        )
        raise ValueError(
            f"{_START.format('env')} {problem}: set it to the number of this worker, or pass rank to init_rpc."
        )
    return int(number)


def _store_address(url: ParseResult) -> tuple[str, int, bool]:
    """Host and port of the Store, and whether torch would run it on libuv."""
    query: dict[str, str] = _query_to_dict(url.query)
    use_libuv: bool = _get_use_libuv_from_query_dict(query)
    start = _START.format(url.scheme)
    if url.scheme == "tcp":
        try:
            host, port = url.hostname, url.port
        except ValueError:
            host, port = None, None
        if not host or port is None:
            raise ValueError(f"{start} port number missing, {url.geturl()} must be like tcp://host:29500.")
        return host, port, use_libuv
    missing = [variable for variable in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(variable)]
    if missing:
        raise ValueError(
            f"{start} environment variable {' and '.join(missing)} expected, but not set: set MASTER_ADDR to the host "
            f"of rank 0 and MASTER_PORT to a free port there, the same for every worker."
        )
    return os.environ["MASTER_ADDR"], check_port(os.environ["MASTER_PORT"]), use_libuv


def check_port(number: str) -> int:
    """Return MASTER_PORT as a number. Raises ValueError if it is not a port."""
    if not number.isdecimal() or int(number) >= 2**16:
        raise ValueError(
            f"{_START.format('env')} MASTER_PORT={number} is not a port: set it to a number from 1 to 65535."
        )
    return int(number)


class JobAddress(NamedTuple):
    """The places where rank 0 of a job may open its Store. It takes the first free port on its host, which is one of
    ``hosts``."""

    job: str
    hosts: tuple[str, ...]
    ports: tuple[int, ...]

    def __str__(self) -> str:
        return f"{' or '.join(self.hosts)}, port {' or '.join(map(str, self.ports))}"


def open_job_store(address: JobAddress, rank: int, world_size: int | None, timeout: float) -> Store:
    """Open or join the Store of a job without a known port. Arguments and errors are as in `create_store`.

    Rank 0 writes the name of the job into its Store. Every other worker tries all hosts and ports, and takes the Store
    with that name. Some places may have the Store of another job.
    """
    global _kept
    deadline = Deadline(timeout)
    store = _serve_job(address) if rank == 0 else _find_job(address, deadline)
    _limit_waits(store, timeout)
    _kept = (None, store)
    return store


def _serve_job(address: JobAddress) -> TCPStore:
    host = next(filter(is_this_host, address.hosts), None)
    if host is None:
        raise JoinFailed(
            f"rank 0 runs on {socket.gethostname()}, and the other workers are going to look for it at "
            f"{' and '.join(address.hosts)}, as MASTER_ADDR or the launcher says: set MASTER_ADDR to the "
            f"host of rank 0."
        )
    for port in address.ports:
        # A port in use raises DistError; but the Store of this process's last group shares its port.
        with contextlib.suppress(DistError):
            store = _connect(host, port, is_server=True)
            store.set(_JOB, address.job)
            return store
    raise JoinFailed(
        f"rank 0 cannot open the Store of this job: the ports {', '.join(map(str, address.ports))} are all in use on "
        f"{socket.gethostname()}; set MASTER_PORT to one that is free, for all workers."
    )


def _find_job(address: JobAddress, deadline: Deadline) -> TCPStore:
    pause = 0.01
    while True:
        # Findings at each place, for the error.
        seen: dict[str, object] = {}
        for port, host in itertools.product(address.ports, address.hosts):
            try:
                socket.create_connection((host, port), timeout=min(1.0, max(0.05, deadline.remaining()))).close()
                store = _connect(host, port, is_server=False)
                if store.check([_JOB]) and store.get(_JOB).decode() == address.job:
                    return store
                seen[f"{host}:{port}"] = "the Store of another job"
            except (OSError, UnicodeError, DistError, TimeoutError) as error:
                seen[f"{host}:{port}"] = error
        if deadline.passed():
            places = "; ".join(f"{place}: {what}" for place, what in seen.items())
            raise JoinTimedOut(
                f"the Store of this job is not at {address}, after {deadline.timeout:g} s: rank 0 must be running "
                f"there. Check that it has started and got as far as init_rpc(), and that its host can be reached; if "
                f"rank 0 is on another host, set MASTER_ADDR to that host. ({places})",
                timeout=deadline.timeout,
            )
        time.sleep(min(pause, deadline.remaining()))
        # Many workers may ask a host that is not ready yet.
        pause = min(2 * pause, 1.0)


def _connect(host: str, port: int, *, is_server: bool) -> TCPStore:
    def create() -> TCPStore:
        return TCPStore(
            host_name=host,
            port=port,
            is_master=is_server,
            timeout=timedelta(seconds=_ANSWER_S),
            wait_for_workers=False,
            multi_tenant=True,
        )

    return _interruptible(create, _ANSWER_S)


def _create_tcp_store(
    host: str, port: int, use_libuv: bool, rank: int, world_size: int | None, deadline: Deadline
) -> TCPStore:
    address = f"{host}:{port}"
    by_torchrun: bool = _torchelastic_use_agent_store()
    is_server = rank == 0 and not by_torchrun
    hint = "" if world_size is not None or by_torchrun else STORE_ENDS
    if not is_server:
        await_listener(host, port, "torchrun" if by_torchrun else "rank 0", deadline, hint)

    answer_s = min(max(_ANSWER_S, deadline.remaining()), _LONGEST_ANSWER_S)

    def create() -> TCPStore:
        if is_server:
            await_name(host, deadline)
        return TCPStore(
            host_name=host,
            port=port,
            world_size=world_size,
            is_master=is_server,
            timeout=timedelta(seconds=answer_s),
            wait_for_workers=False,
            multi_tenant=not by_torchrun,
            use_libuv=use_libuv,
        )

    try:
        # Longer than TCPStore's own timeout. TCPStore overruns its timeout by its last pause, and applies no timeout to
        # a server that never answers.
        return _interruptible(create, answer_s + 2 * _ANSWER_S)
    except JoinTimedOut:
        raise
    except (DistError, TimeoutError) as error:
        if is_server and "EADDRINUSE" in str(error):
            problem = (
                f"rank 0 cannot open the Store at {address}: the port {port} is in use on {socket.gethostname()}, by "
                f"another program, another job or a second rank 0 of this one; choose a free port."
            )
        elif is_server:
            problem = (
                f"rank 0 runs on {socket.gethostname()} and cannot open a Store at {address}: this must be an address "
                f"of its host. ({error})"
            )
        else:
            problem = (
                f"rank {rank} cannot use the server at {address} as a Store: if it is another program, choose another "
                f"port. ({error}){hint}"
            )
        raise JoinFailed(problem) from error


# Threads that remained in C++ when their caller stopped waiting.
_left_behind: list[threading.Thread] = []


@atexit.register
def _await_left_behind() -> None:
    """Wait for the threads left behind: a thread that returns from C++ during finalization would abort the process."""
    end = Deadline(_LAST_WAIT_S)
    for thread in _left_behind:
        thread.join(end.remaining())


def _interruptible(call: Callable[[], T], limit: float) -> T:
    """Run ``call()`` on another thread: then Ctrl-C and TimeoutError reach this one while C++ blocks."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            failure.append(error)

    # A daemon, so that a hanging call does not hold up the end of the process.
    thread = threading.Thread(target=run, name="torch_ucx_rpc-store", daemon=True)
    thread.start()
    try:
        thread.join(limit)
    finally:
        if thread.is_alive():
            _left_behind.append(thread)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"no answer in {limit:g} s")
    return outcome[0]
