"""The statistics of a worker for Prometheus, with the package prometheus_client: `serve`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch_ucx_rpc._bootstrap.forks import close_in_children
from torch_ucx_rpc._observe.statistics import BUCKET_ENDS_US, Latencies, PeerStatistics, ServiceStatistics, Statistics
from torch_ucx_rpc.errors import JoinFailed

# Ends of the buckets that Prometheus gets: every second power of two, from 8 us to 34 s. All buckets, for each peer,
# would be a hundred series.
_BUCKET_ENDS_US = BUCKET_ENDS_US[11::8]
_LAST_PORT = 65_535


class Endpoint:
    """An HTTP server for Prometheus, until `close`."""

    def __init__(self, port: int, server: Any, thread: Any) -> None:
        self.port = port
        self._server = server
        self._thread = thread
        close_in_children(server.socket)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(first_port: int, rank: int, snapshot: Callable[[], Statistics]) -> Endpoint:
    """Serve Prometheus at the port ``first_port + rank``, or at any free one if ``first_port`` is 0.

    Raises JoinFailed if prometheus_client is not installed, or the port is in use or beyond the last one.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise JoinFailed(
            f"the option prometheus_port={first_port} needs the package prometheus_client: pip install "
            f"prometheus_client, or leave the option out. ({error})"
        ) from error
    port = first_port + rank if first_port else 0
    why = f"a worker answers Prometheus at prometheus_port + rank, which is {first_port} + {rank} = {port}"
    if port > _LAST_PORT:
        raise JoinFailed(f"{why}, and the last port is {_LAST_PORT}: choose a smaller prometheus_port, or 0.")
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(_Collector(snapshot))
    try:
        server, thread = prometheus_client.start_http_server(port, registry=registry)
    except OSError as error:
        raise JoinFailed(
            f"{why}, and that port is not available ({error.strerror}): another program, or another job's worker, may "
            f"listen there; choose another prometheus_port, or 0 for any that is free."
        ) from error
    return Endpoint(server.server_port, server, thread)


class _Collector:
    """Takes a snapshot when Prometheus asks. The metrics are the fields of `Statistics` that have a kind."""

    def __init__(self, snapshot: Callable[[], Statistics]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        now = self._snapshot()
        worker = [now.name, str(now.rank)]
        for field in dataclasses.fields(Statistics):
            if field.metadata["kind"]:
                yield _metric(field, ["worker", "rank"], [(worker, getattr(now, field.name))])
        for field in dataclasses.fields(PeerStatistics):
            if field.metadata["kind"]:
                values = [([*worker, peer.name], getattr(peer, field.name)) for peer in now.peers]
                yield _metric(field, ["worker", "rank", "peer"], values)
        for field in dataclasses.fields(ServiceStatistics):
            if field.metadata["kind"]:
                values = [([*worker, each.name], getattr(each, field.name)) for each in now.services]
                yield _metric(field, ["worker", "rank", "service"], values)


def metric_name(field: dataclasses.Field[Any]) -> str:
    """Name of the metric of a field of `Statistics` or one of its parts, as Prometheus shows it."""
    ending = "_total" if field.metadata["kind"] == "counter" else ""
    return f"torch_ucx_rpc_{field.metadata.get('metric', field.name)}{ending}"


def _metric(field: dataclasses.Field[Any], labels: list[str], values: Iterable[tuple[list[str], Any]]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    # Counters append the ending _total themselves.
    name = metric_name(field).removesuffix("_total")
    meaning = field.metadata["meaning"].replace("``", "")
    metric = families[field.metadata["kind"]](name, meaning[0].upper() + meaning[1:], labels=labels)
    for label_values, value in values:
        if isinstance(value, Latencies):
            buckets = [(repr(end / 1e6), value.at_most_us(end)) for end in _BUCKET_ENDS_US]
            buckets.append(("+Inf", value.count))
            metric.add_metric(label_values, buckets, sum_value=value.sum_us / 1e6)
        else:
            metric.add_metric(label_values, len(value) if isinstance(value, tuple) else value)
    return metric
