"""What this worker has done and what it is at: `statistics`, and the snapshot it returns."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from typing import Any

from torch_ucx_rpc import _agent
from torch_ucx_rpc._native import _C
from torch_ucx_rpc._served import ServiceStatistics, services_of

# Where the buckets of latencies end; one more has what took longer.
BUCKET_ENDS_US = tuple(end / 1000 for end in _C.LATENCY_BUCKET_ENDS_NS)


@dataclasses.dataclass(frozen=True)
class Latencies:
    """How long calls took, from ``rpc_sync`` and its kin to their completion; only of those that were answered.

    Durations are counted in buckets, four to a power of two between 1.3 us and 69 s. The difference of two is what came
    in between, and their sum is that of two workers or peers.

    Attributes:
        counts (tuple[int, ...]): calls by bucket, without the empty buckets at the end.
        sum_us (float): of all durations, in microseconds.
    """

    counts: tuple[int, ...] = ()
    sum_us: float = 0.0

    @property
    def count(self) -> int:
        """How many calls these are."""
        return sum(self.counts)

    @property
    def mean_us(self) -> float:
        """In microseconds; nan of no calls."""
        return self.sum_us / self.count if self.counts else math.nan

    def percentile_us(self, percent: float) -> float:
        """What ``percent`` of the calls took less than, in microseconds, at most a quarter too high; nan of no calls.

        Raises ValueError for what is no percentage. Infinite where calls took more than 69 s.

        Example::

            >>> latencies.percentile_us(99)
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percent must be between 0 and 100; it cannot be {percent!r}")
        if not self.counts:
            return math.nan
        wanted = max(1, math.ceil(self.count * percent / 100))
        bucket = bisect.bisect_left(list(itertools.accumulate(self.counts)), wanted)
        return (*BUCKET_ENDS_US, math.inf)[bucket]

    def at_most_us(self, limit_us: float) -> int:
        """How many calls are in the buckets that end at ``limit_us`` microseconds or before."""
        return sum(self.counts[: bisect.bisect_right(BUCKET_ENDS_US, limit_us)])

    def __add__(self, other: Latencies) -> Latencies:
        return self._combined(other, 1)

    def __sub__(self, earlier: Latencies) -> Latencies:
        return self._combined(earlier, -1)

    def _combined(self, other: Latencies, sign: int) -> Latencies:
        length = max(len(self.counts), len(other.counts))
        mine, theirs = ([*counts, *[0] * (length - len(counts))] for counts in (self.counts, other.counts))
        counts = [a + sign * b for a, b in zip(mine, theirs, strict=True)]
        while counts and not counts[-1]:
            counts.pop()
        return Latencies(tuple(counts), self.sum_us + sign * other.sum_us)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerStatistics:
    """One worker of the job, as the worker that was asked sees it. All counts are since its ``init_rpc``.

    Attributes:
        name (str), rank (int), host (str), pid (int): which worker that is.
        session (int): random; tells this life of the worker from an earlier one.
        state (str): ``"present"``, ``"leaving"``, ``"left"`` or ``"failed"``.
        lanes (tuple[str, ...]): what UCX chose to reach it, such as ``"sysv/memory"`` or ``"tcp/eth0"``; none before
            the first message to it, and none to itself, which UCX is not asked for.
        calls_sent (int): calls made to it.
        calls_failed (int): of those, the ones that were not answered: timed out, worker lost, message unreadable, or
            not a Python function and failed there. What a Python function raises is an answer.
        calls_received (int): calls it made here.
        bytes_sent (int), bytes_received (int): bodies and tensors of messages, without UCX's headers.
        latencies (Latencies): of the calls made to it.
    """

    name: str
    rank: int
    host: str
    pid: int
    session: int
    state: str
    lanes: tuple[str, ...]
    calls_sent: int
    calls_failed: int
    calls_received: int
    bytes_sent: int
    bytes_received: int
    latencies: Latencies

    @property
    def calls_open(self) -> int:
        """Calls made to it that have not been completed."""
        # The three are not read at the same moment.
        return max(0, self.calls_sent - self.calls_failed - self.latencies.count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """What a worker has done since its ``init_rpc``, and what it is at.

    Attributes:
        name (str), rank (int): which worker this is.
        peers (tuple[PeerStatistics, ...]): all workers of the job by rank, this one included.
        calls_open (int): calls made here that wait for their answers.
        calls_timed_out (int): calls made here that were given up.
        requests_open (int): calls of others that have arrived and are not answered.
        requests_running (int): of those, the ones that a thread is at; at most ``max_worker_threads``.
        requests_waiting (int): of those, the ones that wait for a thread.
        messages_sending (int): messages that UCX is not done with, or has not been given yet.
        frames_refused (int): messages from strangers, or malformed.
        threads (int), threads_idle (int): of the agent.
        pool_in_use_bytes (int), pool_cached_bytes (int): receive buffers that tensors live in, and idle ones.
        pool_hits (int), pool_misses (int): large tensors that found an idle buffer, and those that did not.
        device_pool_in_use_bytes (int): of CUDA devices, that tensors which have arrived live in; not counted where it
            is torch's own allocator's, whose ``torch.cuda.memory_stats`` tell.
        device_pool_held_bytes (int): released, but not given back yet, since a stream may still use it.
        device_staged_bytes (int): of tensors sent to workers of this host, that went through pinned memory of the host,
            since UCX cannot share theirs.
        window_limit_bytes (int): ``receive_window_bytes``.
        window_in_use_bytes (int): of it, what has been given to large tensors.
        window_waiting_messages (int): messages whose tensors wait at their senders.
        prometheus_port (int | None): where Prometheus finds this, if it was asked for.
        services (tuple[ServiceStatistics, ...]): what it serves by name (`torch_ucx_rpc.services`).
    """

    name: str
    rank: int
    peers: tuple[PeerStatistics, ...]
    calls_open: int
    calls_timed_out: int
    requests_open: int
    requests_running: int
    requests_waiting: int
    messages_sending: int
    frames_refused: int
    threads: int
    threads_idle: int
    pool_in_use_bytes: int
    pool_cached_bytes: int
    pool_hits: int
    pool_misses: int
    device_pool_in_use_bytes: int
    device_pool_held_bytes: int
    device_staged_bytes: int
    window_limit_bytes: int
    window_in_use_bytes: int
    window_waiting_messages: int
    prometheus_port: int | None
    services: tuple[ServiceStatistics, ...] = ()

    @property
    def session(self) -> int:
        """Random; tells this life of the worker from an earlier one."""
        return next(peer.session for peer in self.peers if peer.rank == self.rank)

    @property
    def calls_sent(self) -> int:
        """Calls made here, to all workers."""
        return sum(peer.calls_sent for peer in self.peers)

    @property
    def calls_received(self) -> int:
        """Calls made by all workers to this one."""
        return sum(peer.calls_received for peer in self.peers)

    @property
    def bytes_sent(self) -> int:
        """To all workers."""
        return sum(peer.bytes_sent for peer in self.peers)

    @property
    def bytes_received(self) -> int:
        """From all workers."""
        return sum(peer.bytes_received for peer in self.peers)

    @property
    def latencies(self) -> Latencies:
        """Of the calls made here, to all workers."""
        return sum((peer.latencies for peer in self.peers), Latencies())

    def to_values(self) -> dict[str, Any]:
        """What JSON can write."""
        return dataclasses.asdict(self)

    @classmethod
    def from_values(cls, values: Any) -> Statistics:
        """The snapshot that `to_values` was called on; ValueError for what it cannot have returned."""
        try:
            peers = tuple(_peer(**peer) for peer in values["peers"])
            services = tuple(map(ServiceStatistics.from_values, values.get("services", ())))
            return cls(**{**values, "peers": peers, "services": services})
        except (KeyError, TypeError) as error:
            raise ValueError(f"that is not the statistics of a worker: {error}") from error


def _peer(*, lanes: Any, latencies: Any, **values: Any) -> PeerStatistics:
    counts, sum_us = tuple(latencies["counts"]), latencies["sum_us"]
    return PeerStatistics(**values, lanes=tuple(lanes), latencies=Latencies(counts, sum_us))


def statistics() -> Statistics:
    """A snapshot of what this worker has done since ``init_rpc``, and what it is at.

    Taking it costs tens of microseconds, and some for each peer. Snapshots do not change and can be compared; what
    happened between two is the difference of their counts.

    Raises RuntimeError where RPC is not running with the backend UCX.

    Example::

        >>> for peer in torch_ucx_rpc.statistics().peers:
        ...     print(peer.name, peer.lanes, peer.calls_sent, peer.latencies.percentile_us(99))
    """
    agent = _agent.current
    if agent is None:
        raise RuntimeError(
            'there are no statistics: RPC is not running with the backend UCX; call init_rpc(..., backend="UCX") first'
        )
    return of_agent(agent)


def of_agent(agent: _agent.UcxRpcAgent) -> Statistics:
    """The same for an agent that may not be running."""
    info = agent.get_worker_info()
    values = agent._statistics()
    peers = []
    for peer in values.pop("peers"):
        counts, sum_ns = peer.pop("latency_counts"), peer.pop("latency_sum_ns")
        peers.append(_peer(**peer, latencies={"counts": counts, "sum_us": sum_ns / 1000}))
    return Statistics(
        name=info.name,
        rank=info.id,
        peers=tuple(peers),
        prometheus_port=agent.prometheus_port,
        services=services_of(agent),
        **values,
    )
