"""What do rendezvous and shutdown of 10,000 workers cost? A simulation without processes.

    python -m benchmarks.simulated_start 256 1000 10000
    python -m benchmarks.simulated_start 10000 --late 1     1 % of the workers come 5 s late
    python -m benchmarks.simulated_start 10000 --dying 3    3 inner workers die: as soon as they have the records, and
                                                            in the shutdown

The simulated workers run the product's own code: ``gather_members`` in a greenlet each, with a clock that jumps from
one event to the next, and the C++ barrier (simulated_barrier.cpp). The rest is simulated: one Store (``SERVE_S`` for a
request), relays, and a network with a delay of 50 us and 10 Gbit/s at each host. The program measures the work of rank
0, and the work of each worker with the records, and adds them.

``real_start.py --simulated`` compares the simulation with a real job. The simulation needs greenlet (pip install
greenlet).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import heapq
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch._C._distributed_c10d import HashStore

from torch_ucx_rpc import _agent, _native
from torch_ucx_rpc._bootstrap import deadline, members, packing, relay
from torch_ucx_rpc._bootstrap.record import Record

ROOT = Path(__file__).resolve().parents[1]

DELAY_S = 50e-6
BYTES_PER_S = 10e9 / 8
# The seconds that the one thread of torch's Store needs for a request. They were measured with clients that ask whether
# a key is present.
SERVE_S = 11e-6
# The bytes of a request or an answer without its keys and values.
FRAME_BYTES = 80
LATE_S = 5.0
FAN_OUT = 32


class Clock:
    """Runs one worker at a time, in the order of a simulated time. Each worker is a greenlet."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, greenlet]] = []
        self._number = 0
        self._measured: greenlet | None = None
        self._resumed = 0.0

    def wait(self) -> None:
        """Wait until another worker calls `wake` for this one."""
        parent = getcurrent().parent
        assert parent is not None
        parent.switch()

    def wake(self, at: float, worker: greenlet) -> None:
        self._push(at, worker)

    def start(self, at: float, work: Callable[[], None], takes_time: bool) -> None:
        """Start a worker. With ``takes_time`` its computing also takes simulated time."""
        worker = greenlet(work, parent=getcurrent())
        if takes_time:
            self._measured = worker
        self._push(at, worker)

    def run(self) -> None:
        """Run until all workers have ended."""
        while self._queue:
            self.now, _, worker = heapq.heappop(self._queue)
            self._resumed = time.thread_time()
            worker.switch()

    def sleep_until(self, at: float) -> None:
        worker = getcurrent()
        if worker is self._measured:
            at += time.thread_time() - self._resumed
        self._push(at, worker)
        self.wait()

    def sleep(self, seconds: float) -> None:
        self.sleep_until(self.now + seconds)

    def _push(self, at: float, worker: greenlet) -> None:
        self._number += 1
        heapq.heappush(self._queue, (at, self._number, worker))


class SimulatedStore:
    """The part of a Store that ``members`` uses. One thread serves, and one link carries the answers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._values: dict[str, bytes] = {}
        self._served = self._sent = 0.0
        self.sent_bytes = self.taken_bytes = self.requests = 0
        self.most_bytes = self._held = 0

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._held += len(data) - len(self._values.get(key, b""))
        self._values[key] = data
        self._answer(len(key) + len(data), 0)

    def get(self, key: str) -> bytes:
        value = self._values[key]
        self._answer(len(key), len(value))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = [self._values[key] for key in keys]
        self._answer(sum(map(len, keys)), sum(map(len, values)))
        return values

    def add(self, key: str, amount: int) -> int:
        count = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(count).encode()
        self._answer(len(key), 8)
        return count

    def check(self, keys: list[str]) -> bool:
        is_there = all(key in self._values for key in keys)
        self._answer(sum(map(len, keys)), 1)
        return is_there

    def has_extended_api(self) -> bool:
        return True

    def _answer(self, asked_bytes: int, answer_bytes: int) -> None:
        """Wait for the answer to a request."""
        now = self._clock.now
        arrives = now + DELAY_S + (FRAME_BYTES + asked_bytes) / BYTES_PER_S
        self._served = max(self._served, arrives) + SERVE_S
        self._sent = max(self._sent, self._served) + (FRAME_BYTES + answer_bytes) / BYTES_PER_S
        self.requests += 1
        self.sent_bytes += FRAME_BYTES + answer_bytes
        self.taken_bytes += FRAME_BYTES + asked_bytes
        # Each answer that waits for the link is a copy.
        waiting = int((self._sent - self._served) * BYTES_PER_S)
        self.most_bytes = max(self.most_bytes, self._held + waiting)
        self._clock.sleep_until(self._sent + DELAY_S)


class SimulatedRelay:
    """Replaces ``relay.Relay``. The host sends to one worker after the other."""

    all: ClassVar[list[SimulatedRelay]] = []

    def __init__(self, clock: Clock, below: int, dies: bool) -> None:
        self._clock = clock
        self._dies = dies
        self._waiting: list[greenlet] = []
        # None before the records are there, and empty after the relay's death.
        self._packed: bytes | None = None
        self._sent = 0.0
        self.sent_bytes = 0
        self.places = [len(self.all)] if below else []
        if below:
            self.all.append(self)

    def serve(self, packed: bytes) -> None:
        self._packed = b"" if self._dies else packed
        for worker in self._waiting:
            self._clock.wake(self._send(), worker)
        if self._dies:
            raise GreenletExit

    def close(self) -> None:
        pass

    def give(self) -> bytes:
        """Let the calling worker wait for the records, and return them."""
        began = self._clock.now
        if self._packed is not None:
            self._clock.sleep_until(self._send())
        else:
            self._waiting.append(getcurrent())
            self._clock.wait()
        assert self._clock.now - began < relay._PATIENCE_S, "the worker would have read the Store"
        return self._packed or b""

    def _send(self) -> float:
        size = FRAME_BYTES + len(self._packed or b"")
        self.sent_bytes += size
        self._sent = max(self._sent, self._clock.now + DELAY_S) + size / BYTES_PER_S
        return self._sent + DELAY_S


def record_of(rank: int, workers: int) -> Record:
    """Return a record like those for TCP and shared memory. The address has 24 random bytes, 12 of which occur
    twice."""
    numbers = random.Random(rank)
    host, place = divmod(rank, 8)
    own, queues = numbers.randbytes(4), numbers.randbytes(20)
    address = own + bytes(262) + host.to_bytes(2, "big") + bytes(2 * [place]) + queues + queues[:12]
    return Record(
        rank=rank,
        name=f"worker{rank}",
        world_size=workers,
        session=numbers.getrandbits(64),
        first_rref_id=0,
        first_context_id=0,
        address=address,
        package_version="0.2.0 (wire version 4)",
        torch_version=torch.__version__,
        device_maps={},
        reply_device_maps={},
        devices=[],
        device_count=0,
        host=f"node{host:04}",
        boot_id=f"981875c3-3e83-4466-9f24-{host:012x}",
        pid_namespace=4026531836,
        pid=4000 + place * 2,
        process_start_time=1441462 + place * 4,
        user="0 in user:[4026531837]",
        lifeline_host="",
        lifeline_port=0,
        in_doubt=False,
    )


@contextlib.contextmanager
def simulated_time(clock: Clock, dying: int) -> Iterator[None]:
    """Let ``members`` wait by this clock, unpack the records once for all workers, and let the first relays die."""
    simulated: Any = types.SimpleNamespace(sleep=clock.sleep, monotonic=lambda: clock.now)
    changes: list[tuple[Any, str, Any]] = [
        (members, "time", simulated),
        (deadline, "time", simulated),
        (members, "PrefixStore", lambda _prefix, store: store),
        (members, "Relay", lambda _store, below: SimulatedRelay(clock, below, len(SimulatedRelay.all) < dying)),
        (members, "take", lambda places, _size: SimulatedRelay.all[places[0]].give()),
        (packing, "unpack", functools.lru_cache(None)(packing.unpack)),
    ]
    before = [getattr(module, name) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(changes, before, strict=True):
            setattr(module, name, value)


def rendezvous(workers: int, late: float, dying: int, work_s: float, each_s: float = 0) -> dict[str, float]:
    """Return the figures of a rendezvous.

    Args:
        late: the percentage of workers that come late.
        dying: the number of workers that die when they have the records and others wait for them.
        work_s: the seconds that each worker needs to take in the records.
        each_s: if all workers share a machine, the seconds of the machine that each worker's ``init_rpc`` takes.
    """
    clock = Clock()
    store = SimulatedStore(clock)
    SimulatedRelay.all.clear()
    chance = random.Random(1)
    ended: list[float] = []

    def meet(rank: int) -> None:
        found = members.gather_members(store, record_of(rank, workers), 300.0)  # type: ignore[arg-type]
        assert len(found) == workers
        ended.append(clock.now + work_s)

    gc.disable()  # else rank 0 would search the memory of all workers
    with simulated_time(clock, dying):
        for rank in range(workers):
            is_late = rank != 0 and chance.random() < late / 100
            at = LATE_S if is_late else 0.01 * chance.random()
            at += rank * each_s
            clock.start(at, functools.partial(meet, rank), takes_time=rank == 0)
        clock.run()
    gc.enable()
    return {
        "seconds": max(ended),
        "sent": store.sent_bytes,
        "taken": store.taken_bytes,
        "requests": store.requests,
        "store": store.most_bytes,
        "relay": max((one.sent_bytes for one in SimulatedRelay.all), default=0),
    }


def work_with_records(workers: int) -> tuple[float, float]:
    """Return the additional seconds and bytes that a worker needs to unpack and keep all records."""
    options = torch_options()
    agent = _agent.UcxRpcAgent("worker0", 0, workers, HashStore(), options)
    try:
        records = [record_of(rank, workers) for rank in range(workers)]
        records[0] = records[0]._replace(session=agent.session, address=agent.address)
        packed = packing.pack(records)
        del records
        before, began = resident_bytes(), time.process_time()
        unpacked = packing.unpack(packed)
        agent.add_records(unpacked, unpacked)
        return time.process_time() - began, resident_bytes() - before
    finally:
        agent.shutdown()


def torch_options() -> Any:
    import torch_ucx_rpc

    return torch_ucx_rpc.UcxRpcBackendOptions()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def barrier(folder: str, workers: int, late: float, dying: int) -> dict[str, float]:
    program = Path(folder) / "simulated_barrier"
    if not program.exists():
        csrc = ROOT / "torch_ucx_rpc" / "csrc"
        sources = [ROOT / "benchmarks" / "simulated_barrier.cpp", csrc / "peers" / "barrier.cpp"]
        subprocess.run(["c++", "-std=c++20", "-O2", f"-I{csrc}", *sources, "-o", program], check=True)
    arguments = map(str, (workers, FAN_OUT, late, LATE_S, dying))
    figures: dict[str, float] = json.loads(subprocess.run([program, *arguments], check=True, stdout=-1).stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workers", type=int, nargs="+")
    parser.add_argument("--late", type=float, default=0, metavar="PERCENT", help=f"share that comes {LATE_S:g} s late")
    parser.add_argument("--dying", type=int, default=0, help="inner workers that die")
    arguments = parser.parse_args()
    if _native._C is None:
        sys.exit("the extension is not built")
    print(
        f"{'workers':>7} {'init, s':>8} {'Store sends':>12} {'takes':>10} {'a worker sends':>13} {'requests':>9} ",
        end="",
    )
    print(f"{'Store holds':>12} {'worker holds':>13} {'shutdown, s':>12} {'frames':>7} {'contacts':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for workers in arguments.workers:
            work_s, worker_bytes = work_with_records(workers)
            found = rendezvous(workers, arguments.late, arguments.dying, work_s)
            ending = barrier(folder, workers, arguments.late, arguments.dying)
            sent = found["sent"]
            print(
                f"{workers:>7} {found['seconds']:>8.2f} {sent / 1e6:>9.1f} MB {found['taken'] / 1e6:>7.1f} MB "
                f"{found['relay'] / 1e6:>11.1f} MB {found['requests']:>9} "
                f"{found['store'] / 1e6:>9.1f} MB {worker_bytes / 1e6:>10.1f} MB "
                f"{ending['seconds']:>12.3f} {ending['frames']:>7} {ending['contacts']:>9}",
                flush=True,
            )


if __name__ == "__main__":
    main()
