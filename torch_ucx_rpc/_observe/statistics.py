"""The statistics of this worker: `statistics`, and the snapshot that it returns.

The fields of `Statistics`, `PeerStatistics` and `ServiceStatistics` say what each count means. Their metadata has the
meaning, the unit and the kind of metric. The docstrings, Prometheus's metrics and ``docs/observability.md`` follow from
the metadata. The values come from the table of counts in C++ (``csrc/rpc/reports.cpp``), under the same names. Counts
of services come from ``torch_ucx_rpc.services``. So a new count needs a row in the table and a field in this module.
"""

from __future__ import annotations

import bisect
import dataclasses
import inspect
import itertools
import math
import sys
from dataclasses import field
from typing import Any, TypeVar

from torch_ucx_rpc import _agent
from torch_ucx_rpc._arguments import check_number, wrong_value
from torch_ucx_rpc._native import _C
from torch_ucx_rpc.errors import NotRunning

# The ends of the buckets of latencies. One more bucket counts longer calls.
BUCKET_ENDS_US = tuple(end / 1000 for end in _C.LATENCY_BUCKET_ENDS_NS)


@dataclasses.dataclass(frozen=True)
class Latencies:
    """Durations of answered calls, from ``rpc_sync``, ``rpc_async`` or ``remote`` to completion.

    Buckets count the durations, four to a power of two between 1.3 us and 69 s. The difference of two objects covers
    the calls between the two; the sum combines workers or peers.

    Attributes:
        counts (tuple[int, ...]): calls by bucket, without the empty buckets at the end.
        sum_us (float): sum of all durations, in microseconds.
    """

    counts: tuple[int, ...] = ()
    sum_us: float = 0.0

    @property
    def count(self) -> int:
        """Number of calls."""
        return sum(self.counts)

    @property
    def mean_us(self) -> float:
        """Mean duration, in microseconds; nan without calls."""
        return self.sum_us / self.count if self.counts else math.nan

    def percentile_us(self, percent: float) -> float:
        """The duration that ``percent`` of the calls did not exceed, in microseconds; nan without calls.

        The value is the end of a bucket, at most a quarter too high, and infinite for calls over 69 s. Raises
        ValueError for a ``percent`` outside 0 to 100.

        Example::

            >>> latencies.percentile_us(99)
        """
        check_number("percent", percent)
        if not 0 <= percent <= 100:
            raise wrong_value("percent", "between 0 and 100", percent)
        if not self.counts:
            return math.nan
        wanted = max(1, math.ceil(self.count * percent / 100))
        bucket = bisect.bisect_left(list(itertools.accumulate(self.counts)), wanted)
        return (*BUCKET_ENDS_US, math.inf)[bucket]

    def at_most_us(self, limit_us: float) -> int:
        """Number of calls in the buckets that end at ``limit_us`` microseconds or before."""
        check_number("limit_us", limit_us)
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


def _counter(meaning: str, unit: str) -> dict[str, str]:
    """Metadata of a field that only grows; Prometheus reads it."""
    return {"meaning": meaning, "unit": unit, "kind": "counter"}


def _gauge(meaning: str, unit: str) -> dict[str, str]:
    """Metadata of a field that rises and falls; Prometheus reads it."""
    return {"meaning": meaning, "unit": unit, "kind": "gauge"}


def _label(meaning: str, unit: str = "") -> dict[str, str]:
    """Metadata of a field that is not a metric."""
    return {"meaning": meaning, "unit": unit, "kind": ""}


_Class = TypeVar("_Class")


def _documented(cls: type[_Class]) -> type[_Class]:
    """Class decorator: describes the fields in the docstring, from their metadata."""
    # Python 3.13 removes the indentation of docstrings, and earlier versions leave it.
    lines = [inspect.cleandoc(cls.__doc__ or ""), "", "Attributes:"]
    for each in dataclasses.fields(cls):  # type: ignore[arg-type]
        first, *words = f"{each.name} ({each.type}): {each.metadata['meaning']}.".split()
        lines.append(" " * 4 + first)
        for word in words:
            if len(lines[-1]) + len(word) < 120:
                lines[-1] += f" {word}"
            else:
                lines.append(" " * 8 + word)
    cls.__doc__ = "\n".join(lines) + "\n"
    return cls


@_documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerStatistics:
    """One worker of the job, as seen by the worker with these statistics. All counts begin with that worker's
    ``init_rpc``.

    docs/observability.md has a table of the fields.
    """

    name: str = field(metadata=_label("name of the peer"))
    rank: int = field(metadata=_label("rank of the peer"))
    host: str = field(metadata=_label("name of the peer's host"))
    pid: int = field(metadata=_label("id of the peer's process"))
    session: int = field(metadata=_label("random number; distinguishes this life of the peer from an earlier one"))
    state: str = field(
        metadata=_label(
            '``"present"``, ``"resuming"`` (silent for heartbeat_limit), ``"leaving"``, ``"left"`` or ``"failed"``'
        )
    )
    lanes: tuple[str, ...] = field(
        metadata=_label(
            'transports that UCX has chosen to reach the peer, such as ``"sysv/memory"`` or ``"tcp/eth0"``; empty '
            "before the first message, and for this worker itself"
        )
    )
    calls_sent: int = field(metadata=_counter("calls made to the peer", "calls"))
    calls_failed: int = field(
        metadata=_counter(
            "calls made to the peer without an answer: timed out, worker lost, message unreadable, or a C++ or "
            "TorchScript function failed there; an exception of a Python function is an answer",
            "calls",
        )
    )
    calls_received: int = field(metadata=_counter("calls that the peer made here", "calls"))
    bytes_sent: int = field(
        metadata=_counter("bodies and tensors of messages to the peer, without UCX's headers", "bytes")
    )
    bytes_received: int = field(
        metadata=_counter("bodies and tensors of messages from the peer, without UCX's headers", "bytes")
    )
    times_resumed: int = field(
        metadata=_counter(
            "silences of the peer that were longer than heartbeat_limit, and connections to it that failed", "times"
        )
    )
    resend_bytes: int = field(
        metadata=_gauge("messages to the peer that are kept, to be sent again if the connection fails", "bytes")
    )
    latencies: Latencies = field(
        metadata={
            "meaning": "durations of the calls made to the peer that were answered",
            "unit": "seconds",
            "kind": "histogram",
            "metric": "call_duration_seconds",
        }
    )

    @property
    def calls_open(self) -> int:
        """Calls made to the peer that have not been completed."""
        # C++ does not read the three counts at the same moment.
        return max(0, self.calls_sent - self.calls_failed - self.latencies.count)


@_documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceStatistics:
    """One name of `torch_ucx_rpc.services` that a worker offers. All counts begin with its registration.

    docs/observability.md has a table of the fields.
    """

    name: str = field(metadata=_label("name of the service"))
    replicas: tuple[str, ...] = field(
        metadata={
            **_gauge("all workers that offer the service, as far as this one knows, by rank", "workers"),
            "metric": "service_replicas",
        }
    )
    calls: int = field(
        metadata={**_counter("calls of the service that have begun here", "calls"), "metric": "service_calls"}
    )
    errors: int = field(
        metadata={**_counter("calls of the service that have raised here", "calls"), "metric": "service_errors"}
    )
    open: int = field(
        metadata={**_gauge("calls of the service that are running here", "calls"), "metric": "service_open"}
    )


@_documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """The counts of a worker since its ``init_rpc``, and its present state.

    docs/observability.md has a table of the fields.
    """

    name: str = field(metadata=_label("name of this worker"))
    rank: int = field(metadata=_label("rank of this worker"))
    peers: tuple[PeerStatistics, ...] = field(metadata=_label("all workers of the job by rank, this one included"))
    calls_open: int = field(metadata=_gauge("calls made here that wait for their answers", "calls"))
    calls_timed_out: int = field(metadata=_counter("calls made here that timed out", "calls"))
    requests_expired: int = field(
        metadata=_counter(
            "calls of others that were dropped before they ran, since their callers had given up", "calls"
        )
    )
    values_put: int = field(metadata=_counter("values that channels of this worker have put", "values"))
    values_taken: int = field(metadata=_counter("values that this worker has taken from channels", "values"))
    values_untaken_bytes: int = field(
        metadata=_gauge("bytes of large tensors that channels have received before they were expected", "bytes")
    )
    requests_open: int = field(metadata=_gauge("calls of others that have arrived and are not answered", "calls"))
    requests_running: int = field(
        metadata=_gauge("open requests that a thread is running; at most ``max_worker_threads``", "calls")
    )
    requests_waiting: int = field(metadata=_gauge("open requests that wait for a thread", "calls"))
    messages_sending: int = field(
        metadata=_gauge("messages that UCX has not finished sending, or has not been given yet", "messages")
    )
    frames_refused: int = field(metadata=_counter("messages from strangers, or malformed", "messages"))
    threads: int = field(metadata=_gauge("threads of the agent", "threads"))
    threads_idle: int = field(metadata=_gauge("idle threads of the agent", "threads"))
    pool_in_use_bytes: int = field(metadata=_gauge("receive buffers that tensors live in", "bytes"))
    pool_cached_bytes: int = field(metadata=_gauge("idle receive buffers", "bytes"))
    pool_hits: int = field(metadata=_counter("large tensors that found an idle receive buffer", "tensors"))
    pool_misses: int = field(metadata=_counter("large tensors that found no idle receive buffer", "tensors"))
    device_pool_in_use_bytes: int = field(
        metadata=_gauge(
            "CUDA memory that holds received tensors; memory of torch's own allocator is not counted, see "
            "``torch.cuda.memory_stats``",
            "bytes",
        )
    )
    device_pool_held_bytes: int = field(
        metadata=_gauge("memory of CUDA devices that was released, and that a stream may still use", "bytes")
    )
    device_staged_bytes: int = field(
        metadata=_counter(
            "device tensors sent to workers of this host through pinned host memory, since UCX cannot share their "
            "memory",
            "bytes",
        )
    )
    window_limit_bytes: int = field(
        metadata=_gauge("the option ``receive_window_bytes``: large tensors received at a time, at most", "bytes")
    )
    window_in_use_bytes: int = field(metadata=_gauge("part of the window that large tensors occupy", "bytes"))
    window_waiting_messages: int = field(metadata=_gauge("messages whose tensors wait at their senders", "messages"))
    prometheus_port: int | None = field(
        metadata=_label("port where Prometheus reads these statistics; None without the option ``prometheus_port``")
    )
    services: tuple[ServiceStatistics, ...] = field(
        default=(), metadata=_label("names of ``torch_ucx_rpc.services`` that this worker offers")
    )

    @property
    def session(self) -> int:
        """Random number that distinguishes lives of the worker."""
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
        """Bytes sent to all workers."""
        return sum(peer.bytes_sent for peer in self.peers)

    @property
    def bytes_received(self) -> int:
        """Bytes received from all workers."""
        return sum(peer.bytes_received for peer in self.peers)

    @property
    def latencies(self) -> Latencies:
        """Durations of the calls made here, to all workers."""
        return sum((peer.latencies for peer in self.peers), Latencies())

    def to_values(self) -> dict[str, Any]:
        """This snapshot as values that JSON can write."""
        return dataclasses.asdict(self)

    @classmethod
    def from_values(cls, values: Any) -> Statistics:
        """The snapshot that `to_values` converted. Raises ValueError for other values."""
        try:
            peers = tuple(_peer(**peer) for peer in values["peers"])
            services = tuple(_service(**service) for service in values.get("services", ()))
            return cls(**{**values, "peers": peers, "services": services})
        except (KeyError, TypeError) as error:
            raise ValueError(f"that is not the statistics of a worker: {error}") from error


def _peer(*, lanes: Any, latencies: Any, **values: Any) -> PeerStatistics:
    counts, sum_us = tuple(latencies["counts"]), latencies["sum_us"]
    return PeerStatistics(**values, lanes=tuple(lanes), latencies=Latencies(counts, sum_us))


def _service(*, replicas: Any, **values: Any) -> ServiceStatistics:
    return ServiceStatistics(**values, replicas=tuple(replicas))


def statistics() -> Statistics:
    """A snapshot of this worker's work since ``init_rpc``, done and under way.

    A snapshot costs tens of microseconds, and a few more for each peer. Snapshots do not change and can be compared.
    The difference of two counts covers the time between the snapshots.

    Raises NotRunning if RPC is not running with the backend UCX.

    Example::

        >>> for peer in torch_ucx_rpc.statistics().peers:
        ...     print(peer.name, peer.lanes, peer.calls_sent, peer.latencies.percentile_us(99))
    """
    agent = _agent.current
    if agent is None:
        raise NotRunning(
            'there are no statistics: RPC is not running with the backend UCX; call init_rpc(..., backend="UCX") first'
        )
    return of_agent(agent)


def of_agent(agent: _agent.UcxRpcAgent) -> Statistics:
    """A snapshot of an agent, which need not be the running one."""
    info = agent.get_worker_info()
    values = agent._statistics()
    peers = []
    for peer in values.pop("peers"):
        del peer["has_ended"]
        counts, sum_ns = peer.pop("latency_counts"), peer.pop("latency_sum_ns")
        peers.append(_peer(**peer, latencies={"counts": counts, "sum_us": sum_ns / 1000}))
    return Statistics(
        name=info.name,
        rank=info.id,
        peers=tuple(peers),
        prometheus_port=agent.prometheus_port,
        services=_services_of(agent),
        **values,
    )


def _services_of(agent: _agent.UcxRpcAgent) -> tuple[ServiceStatistics, ...]:
    """Return the names that the worker of this agent offers; none unless the program has imported
    `torch_ucx_rpc.services`."""
    services = sys.modules.get("torch_ucx_rpc.services._api")
    return () if services is None else services.statistics_of(agent)
