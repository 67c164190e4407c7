"""The fields of ``Statistics`` are the only table of all counters. Docstrings, metrics and docs agree with it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from torch_ucx_rpc import Latencies, PeerStatistics, ServiceStatistics, Statistics
from torch_ucx_rpc._observe.prometheus import _Collector, metric_name

PAGE = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
CLASSES = (Statistics, PeerStatistics, ServiceStatistics)


def snapshot() -> Statistics:
    """One worker, one peer and one service, in which all values differ."""
    numbers = iter(range(1, 1000))
    values: dict[type, Any] = {}
    for class_ in CLASSES:
        values[class_] = {field.name: next(numbers) for field in dataclasses.fields(class_)}
    latencies = Latencies((0, 2, 3), 5e6)
    peer = PeerStatistics(**{**values[PeerStatistics], "name": "other", "lanes": (), "latencies": latencies})
    replicas = ("me", "other", "third")
    service = ServiceStatistics(**{**values[ServiceStatistics], "name": "score", "replicas": replicas})
    return Statistics(**{**values[Statistics], "name": "me", "peers": (peer,), "services": (service,)})


def row(field: dataclasses.Field[Any]) -> str:
    meaning = field.metadata["meaning"].replace("``", "`").replace("|", "\\|")
    kind = f"{field.metadata['kind']} `{metric_name(field)}`" if field.metadata["kind"] else ""
    return f"| `{field.name}` | {field.metadata['unit']} | {meaning[0].upper()}{meaning[1:]}. | {kind} |"


@pytest.mark.parametrize("class_", CLASSES)
def test_the_docs_have_a_row_for_each_field(class_: type) -> None:
    expected = [row(field) for field in dataclasses.fields(class_)]
    section = PAGE.read_text(encoding="utf-8").partition(f"## `{class_.__name__}`")[2].partition("\n## ")[0]
    found = [line for line in section.splitlines() if line.startswith("| `")]
    assert found == expected, "docs/observability.md must have:\n" + "\n".join(expected)


@pytest.mark.parametrize("class_", CLASSES)
def test_the_docstring_has_an_entry_for_each_field(class_: type) -> None:
    doc = inspect.getdoc(class_) or ""
    listed = re.findall(r"^    (\w+) \(", doc.partition("Attributes:\n")[2], re.MULTILINE)
    assert listed == [field.name for field in dataclasses.fields(class_)]
    assert max(map(len, doc.splitlines())) <= 120


def test_prometheus_has_a_metric_for_each_field_that_has_a_kind() -> None:
    now = snapshot()
    samples = {
        (sample.name, sample.labels.get("peer", sample.labels.get("service"))): sample.value
        for family in _Collector(lambda: now).collect()
        for sample in family.samples
        if sample.labels.get("le", "+Inf") == "+Inf"
    }
    expected: dict[tuple[str, str | None], float] = {}
    for thing, part in ((now, None), (now.peers[0], "other"), (now.services[0], "score")):
        for field in dataclasses.fields(thing):
            kind, value = field.metadata["kind"], getattr(thing, field.name)
            assert kind in ("", "counter", "gauge", "histogram")
            if kind == "histogram":
                name = metric_name(field)
                expected |= {(f"{name}_bucket", part): 5, (f"{name}_count", part): 5, (f"{name}_sum", part): 5.0}
            elif kind:
                expected[metric_name(field), part] = len(value) if isinstance(value, tuple) else value
    assert samples == expected
    # Dashboards use these names, so they are part of the public API.
    assert {
        "torch_ucx_rpc_calls_timed_out_total",
        "torch_ucx_rpc_calls_open",
        "torch_ucx_rpc_calls_sent_total",
        "torch_ucx_rpc_call_duration_seconds_sum",
        "torch_ucx_rpc_window_limit_bytes",
    } <= {name for name, _ in samples}


def test_the_dashboard_asks_for_existing_metrics() -> None:
    dashboard = json.loads((PAGE.parent / "assets" / "grafana_dashboard.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [variable.get("definition", "") for variable in dashboard["templating"]["list"]]
    asked = {name for text in expressions for name in re.findall(r"torch_ucx_rpc_\w+", text)}
    now = snapshot()
    assert asked <= {sample.name for family in _Collector(lambda: now).collect() for sample in family.samples}
    assert len(asked) > 15
    labels = {label for text in expressions for by in re.findall(r"by \(([^)]*)\)", text) for label in by.split(", ")}
    assert labels == {"worker", "peer", "le"}
