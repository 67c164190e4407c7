"""The port on which a worker answers Prometheus, and its errors. ``e2e/test_statistics`` tests the answers."""

from __future__ import annotations

import sys
import urllib.request

import pytest

from tests.support.workers import reserved_port
from torch_ucx_rpc import Statistics
from torch_ucx_rpc._observe import prometheus
from torch_ucx_rpc.errors import JoinFailed


def nothing_yet() -> Statistics:
    counts = dict.fromkeys(Statistics.__dataclass_fields__, 0)
    return Statistics(**{**counts, "name": "w", "peers": (), "services": ()})


def test_the_port_is_the_first_plus_the_rank() -> None:
    with reserved_port() as port:
        endpoint = prometheus.serve(port - 3, 3, nothing_yet)
        assert endpoint.port == port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            assert b'torch_ucx_rpc_threads{rank="0",worker="w"} 0.0' in answer.read()
        endpoint.close()


def test_a_port_beyond_the_last_one_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"prometheus_port .*65000 \+ 1000"):
        prometheus.serve(65_000, 1000, nothing_yet)


def test_error_without_prometheus_client_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(JoinFailed, match=r"pip install prometheus_client"):
        prometheus.serve(0, 0, nothing_yet)
