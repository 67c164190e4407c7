"""A Chrome trace of a step: it shows which stage did which micro-batch when."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_ucx_rpc.pipeline._schedule import Action

__all__ = ["check_path", "write_chrome"]

# Actions of each worker, with their begin and end in seconds.
Events = Sequence[Sequence[tuple[Action, float, float]]]

_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


def check_path(path: str | os.PathLike[str]) -> None:
    """Raise ValueError unless the path ends in .json."""
    if Path(path).suffix.lower() != ".json":
        raise ValueError(f"{os.fspath(path)!r}: a trace is a Chrome trace, with a path that ends in .json")


def write_chrome(path: Any, events: Events, workers: Sequence[str]) -> None:
    """Write a trace for chrome://tracing and Perfetto, with a process for each worker and a thread for each stage."""
    actions = [(row, *event) for row, some in enumerate(events) for event in some]
    start = min(begin for _, _, begin, _ in actions)
    entries: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": row, "args": {"name": worker}} for row, worker in enumerate(workers)
    ]
    for row, stage in sorted({(row, action.stage) for row, action, _, _ in actions}):
        name = {"name": f"stage {stage}"}
        entries.append({"name": "thread_name", "ph": "M", "pid": row, "tid": stage, "args": name})
    for row, action, begin, end in actions:
        entries.append(
            {
                "name": str(action),
                "cat": _NAMES[action.kind],
                "ph": "X",
                "pid": row,
                "tid": action.stage,
                "ts": 1e6 * (begin - start),
                "dur": 1e6 * (end - begin),
                "args": {"stage": action.stage, "micro_batch": action.micro_batch},
            }
        )
    Path(path).write_text(json.dumps({"traceEvents": entries}), encoding="utf-8")
