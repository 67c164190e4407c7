"""The life of each worker, from joining to leaving: `live`."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import itertools
import os
import re
import socket
import time
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

from tests.support.workers import Steps, agent, eventually, init_rpc, worker_name

from . import _work
from ._journal import Journal

# The options of the workers. The limits fit a run of one minute on two cores.
HEARTBEAT_LIMIT_S = 4.0
RPC_TIMEOUT_S = 20.0
# The longest call is a push whose hosts are lost: an unanswered call, a search for other hosts, and a call to one.
LONGEST_CALL_S = 3 * RPC_TIMEOUT_S + 10
OPTIONS = {
    "heartbeat_limit": HEARTBEAT_LIMIT_S,
    "reconnect_limit": 0,
    "rpc_timeout": RPC_TIMEOUT_S,
    "receive_window_bytes": 32 << 20,
    "host_pool_bytes": 64 << 20,
}

_CALLERS = 3
# The time for all to see each other again after the last misfortune.
_SETTLING_S = 2 * HEARTBEAT_LIMIT_S + 10
_JOINING_S = 60.0
# Longer than the wait of the crew's leader, so that the leader finds the worker hanging.
_PATIENCE_S = 600.0
# The time in which ending threads must be gone.
_ENDING_S = 5.0

# Files that a next group keeps: the connection to the Store, UCX's and torch's descriptors for waiting, and a
# neighbour's pidfd. Their number does not grow with further memberships.
_KEPT_OPEN = collections.Counter(
    {"socket": 1, "anon_inode:[eventpoll]": 2, "anon_inode:[eventfd]": 1, "anon_inode:[pidfd]": 1}
)
# Threads for the life of the process: torch's engine of distributed autograd, and its pool between operators.
_KEPT_RUNNING = collections.Counter({"pt_dist_engine": 1, "PTThreadPool": os.cpu_count() or 1})

_TRIM_EVERY_S = 5.0
# From <malloc.h>.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


@dataclasses.dataclass(frozen=True)
class Life:
    """The identity of a process, and its folder."""

    rank: int
    generation: int
    world_size: int
    seed: int
    directory: Path
    is_fixed: bool

    def __str__(self) -> str:
        return f"{self.rank}.{self.generation}"


def hangs(who: str) -> str:
    """Return the step of a worker whose calls do not end. The worker goes on after the step `seen: ...`."""
    return f"{who} hangs"


def live(rank: int, life: Life) -> dict[str, int]:
    """The body of a worker: calls and is called, until it gets the order to stop. Returns the numbers of its leftovers.

    The stacks of leftover threads are in a file beside the journals, like the stacks of all workers while its calls
    hang.
    """
    _return_freed_memory()
    journal = Journal(life.directory, rank, life.generation)
    steps = Steps(life.directory)
    _work.write_to(journal)
    # Dead workers hold references that owners have passed to them. No worker can release these.
    rpc.api._ignore_rref_leak = True

    files, threads = _open_files(), _threads()
    for membership in itertools.count():
        _join(journal, rank, life.world_size if life.is_fixed else None)
        who = f"{life} {membership}"
        steps.done(f"joined {who}")
        _work.offer_names(journal, who)
        callers = [_work.Caller(journal, who, f"{life.seed} {who} {n}") for n in range(_CALLERS)]
        for caller in callers:
            caller.start()
        is_over = _wait_for_any(steps, "stop", f"rejoin {who}") == "stop"
        if is_over:
            _see_all(journal, life)
        for caller in callers:
            caller.stop()
        for caller in callers:
            if not caller.join(LONGEST_CALL_S):
                journal.note("hangs", caller=caller.name)
                # The cause may be in any worker, so the crew's leader writes down the stacks of all.
                steps.done(hangs(who))
                steps.wait_for(f"seen: {hangs(who)}", timeout=_PATIENCE_S)
        journal.note("leaving", name=worker_name(rank), pid=os.getpid())
        if is_over:
            break
        rpc.shutdown(graceful=False)

    steps.done(f"stopped {who}")
    steps.wait_for("let go", timeout=_PATIENCE_S)
    _work.let_go()
    left = _what_is_left()
    steps.done(f"released {who}")
    steps.wait_for("leave", timeout=_PATIENCE_S)
    rpc.shutdown()
    # The kernel lists a thread for a moment after its join, and the last thread's end closes files.
    ended_by = time.monotonic() + _ENDING_S
    while True:
        gc.collect()
        running, open_files = _threads() - threads - _KEPT_RUNNING, _open_files() - files - _KEPT_OPEN
        if not (running or open_files) or time.monotonic() > ended_by:
            break
        time.sleep(0.01)
    left.update({f"open: {name}": count for name, count in open_files.items()})
    if running:
        with (life.directory / f"{life}.stacks").open("w") as stacks:
            faulthandler.dump_traceback(stacks, all_threads=True)
    left.update({f"thread: {name}": count for name, count in running.items()})
    return left


def _join(journal: Journal, rank: int, world_size: int | None) -> None:
    deadline = time.monotonic() + _JOINING_S
    journal.note("joining", name=worker_name(rank), pid=os.getpid(), host=socket.gethostname())
    while True:
        began = time.monotonic()
        try:
            init_rpc(rank, world_size=world_size)
            break
        except RuntimeError as error:
            # The Store or another worker is out of reach just now.
            journal.note("not admitted", began=began, error=str(error))
            if time.monotonic() > deadline:
                raise
    journal.note("joined", name=worker_name(rank), pid=os.getpid(), host=socket.gethostname())


def _wait_for_any(steps: Steps, *names: str) -> str:
    libc, trimmed_at = ctypes.CDLL(None), time.monotonic()
    while True:
        if time.monotonic() - trimmed_at > _TRIM_EVERY_S:
            # Trim the heap, so that resident memory is memory in use.
            libc.malloc_trim(0)
            trimmed_at = time.monotonic()
        for name in names:
            if steps.is_done(name):
                return name
        time.sleep(0.05)


def _see_all(journal: Journal, life: Life) -> None:
    """After the last misfortune every worker must know and reach every other."""
    everybody = {worker_name(rank) for rank in range(life.world_size)}

    def present() -> set[str]:
        return {info.name for info in agent().get_worker_infos()}

    try:
        eventually(lambda: present() == everybody, "all are there", _SETTLING_S)
        for name in sorted(everybody):
            rpc.rpc_sync(name, torch.add, args=(torch.ones(2), 1))
    except (AssertionError, RuntimeError) as error:
        missing = sorted(everybody - present())
        journal.note("split", name=worker_name(life.rank), missing=missing, error=str(error))


def _what_is_left() -> dict[str, int]:
    """Count calls, buffers and references, once all calls have ended."""

    seen: dict[str, int] = {}

    def counts() -> dict[str, int]:
        gc.collect()
        # The collection held the GIL. Let messages between members pass.
        time.sleep(0.05)
        metrics = agent().get_metrics()
        names = (
            "pool.in_use_bytes",
            "window.in_use_bytes",
            "window.waiting_messages",
            "agent.server_active_calls",
            "channel.values_untaken_bytes",
        )
        return {
            **{name: int(metrics[name]) for name in names},
            "autograd contexts": int(dist_autograd._get_debug_info()["num_autograd_contexts"]),
            "values of RRefs": int(rpc._rref_context_get_debug_info()["num_owner_rrefs"]),
        }

    def is_quiet() -> bool:
        seen.update(counts())
        return not any(count for name, count in seen.items() if name != "values of RRefs")

    with contextlib.suppress(AssertionError):
        eventually(is_quiet, "nothing is left", _SETTLING_S)
    return seen


def _return_freed_memory() -> None:
    """Return memory at once, so that resident memory is memory in use. glibc would keep pieces of up to 32 MiB a
    thread."""
    libc = ctypes.CDLL(None)
    for parameter, value in ((_M_MMAP_THRESHOLD, 128 << 10), (_M_ARENA_MAX, 2)):
        libc.mallopt(parameter, value)


def _open_files() -> collections.Counter[str]:
    """The kinds of the open descriptors of this process."""
    found: collections.Counter[str] = collections.Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[re.sub(r":\[\d+\]$", "", str(descriptor.readlink()))] += 1
    return found


def _threads() -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process or file is gone
            found[(task / "comm").read_text().strip()] += 1
    return found
