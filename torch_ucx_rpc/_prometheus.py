"""The statistics of a worker for Prometheus, with the package prometheus_client: `serve`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch_ucx_rpc._statistics import BUCKET_ENDS_US, Statistics

# Where the buckets that Prometheus gets end: every second power of two, from 8 us to 34 s. All of ours, for each peer,
# would be a hundred series.
_BUCKET_ENDS_US = BUCKET_ENDS_US[11::8]
_LAST_PORT = 65_535

# Name, what it is, and which field of the snapshot. Counters get the ending _total by themselves.
_COUNTERS = {
    "calls_timed_out": "Calls made here that were given up",
    "frames_refused": "Messages from strangers, or malformed",
    "pool_hits": "Large tensors that found an idle receive buffer",
    "pool_misses": "Large tensors that did not find an idle receive buffer",
    "device_staged_bytes": "Bytes for workers of this host that went from a device through the host's memory",
}
_GAUGES = {
    "calls_open": "Calls made here that wait for their answers",
    "requests_open": "Calls of others that have arrived and are not answered",
    "requests_running": "Calls of others that a thread is at",
    "requests_waiting": "Calls of others that wait for a thread",
    "messages_sending": "Messages that UCX is not done with, or has not been given yet",
    "threads": "Threads of the agent",
    "threads_idle": "Idle threads of the agent",
    "pool_in_use_bytes": "Receive buffers that tensors live in",
    "pool_cached_bytes": "Idle receive buffers",
    "device_pool_in_use_bytes": "Memory of devices that received tensors live in, if not of torch's own allocator",
    "device_pool_held_bytes": "Memory of devices that streams may still use after its release",
    "window_limit_bytes": "Most bytes of large tensors that are received at a time",
    "window_in_use_bytes": "Bytes that have been given to large tensors",
    "window_waiting_messages": "Messages whose tensors wait at their senders",
}
_PEER_COUNTERS = {
    "calls_sent": "Calls made to the peer",
    "calls_failed": "Calls made to the peer that were not answered",
    "calls_received": "Calls that the peer made here",
    "bytes_sent": "Bytes of messages to the peer",
    "bytes_received": "Bytes of messages from the peer",
}
_SERVICE_COUNTERS = {
    "calls": "Calls of the service that have begun here",
    "errors": "Calls of the service that have raised here",
}


class Endpoint:
    """An HTTP server for Prometheus, until `close`."""

    def __init__(self, port: int, server: Any, thread: Any) -> None:
        self.port = port
        self._server = server
        self._thread = thread

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(first_port: int, rank: int, snapshot: Callable[[], Statistics]) -> Endpoint:
    """Answer Prometheus at the port ``first_port + rank``, or at any free one if ``first_port`` is 0.

    Raises RuntimeError where prometheus_client is not installed or the port cannot be had.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise RuntimeError(
            f"the option prometheus_port={first_port} needs the package prometheus_client: pip install "
            f"prometheus_client, or leave the option out. ({error})"
        ) from error
    port = first_port + rank if first_port else 0
    why = f"a worker answers Prometheus at prometheus_port + rank, which is {first_port} + {rank} = {port}"
    if port > _LAST_PORT:
        raise RuntimeError(
            f"{why}, and the last port there is is {_LAST_PORT}: choose a smaller prometheus_port, or 0."
        )
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(_Collector(snapshot))
    try:
        server, thread = prometheus_client.start_http_server(port, registry=registry)
    except OSError as error:
        raise RuntimeError(
            f"{why}, and that port cannot be had ({error.strerror}): another program, or another job's worker, may "
            f"listen there; choose another prometheus_port, or 0 for any that is free."
        ) from error
    return Endpoint(server.server_port, server, thread)


class _Collector:
    """Takes a snapshot when Prometheus asks."""

    def __init__(self, snapshot: Callable[[], Statistics]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        now = self._snapshot()
        worker = [now.name, str(now.rank)]
        for family, fields in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for field, meaning in fields.items():
                metric = family(f"torch_ucx_rpc_{field}", meaning, labels=["worker", "rank"])
                metric.add_metric(worker, getattr(now, field))
                yield metric
        for field, meaning in _PEER_COUNTERS.items():
            metric = CounterMetricFamily(f"torch_ucx_rpc_{field}", meaning, labels=["worker", "rank", "peer"])
            for peer in now.peers:
                metric.add_metric([*worker, peer.name], getattr(peer, field))
            yield metric
        of_service = ["worker", "rank", "service", "group"]
        served = [(service, [*worker, service.name, service.group or ""]) for service in now.services]
        for field, meaning in _SERVICE_COUNTERS.items():
            metric = CounterMetricFamily(f"torch_ucx_rpc_service_{field}", meaning, labels=of_service)
            for service, labels in served:
                metric.add_metric(labels, getattr(service, field))
            yield metric
        open_calls = GaugeMetricFamily(
            "torch_ucx_rpc_service_open", "Calls of the service that go on here", labels=of_service
        )
        replicas = GaugeMetricFamily(
            "torch_ucx_rpc_service_replicas", "Workers that offer the service", labels=of_service
        )
        for service, labels in served:
            open_calls.add_metric(labels, service.open)
            replicas.add_metric(labels, len(service.replicas))
        yield open_calls
        yield replicas
        durations = HistogramMetricFamily(
            "torch_ucx_rpc_call_duration_seconds",
            "How long calls to the peer took that were answered",
            labels=["worker", "rank", "peer"],
        )
        for peer in now.peers:
            buckets = [(repr(end / 1e6), peer.latencies.at_most_us(end)) for end in _BUCKET_ENDS_US]
            buckets.append(("+Inf", peer.latencies.count))
            durations.add_metric([*worker, peer.name], buckets, sum_value=peer.latencies.sum_us / 1e6)
        yield durations
