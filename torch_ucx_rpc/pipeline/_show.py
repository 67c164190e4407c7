"""A pipeline as text: ``print(pipe)``, and a Chrome trace of a step."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_ucx_rpc.pipeline._partition import StageInfo
from torch_ucx_rpc.pipeline._schedule import Action

__all__ = ["check_path", "table", "write_chrome"]

_HEAD = ("stage", "worker", "layers", "parameters", "profiled ms")


def table(infos: Sequence[StageInfo], workers: Sequence[str], schedule: str, chunks: int, rematerialize: bool) -> str:
    """Lines with the columns of ``_HEAD``; the last column only for profiled layers."""
    rows = [
        (
            str(stage),
            worker,
            info.layers,
            "?" if info.parameters is None else f"{info.parameters:,}",
            "" if info.milliseconds is None else f"{info.milliseconds:.2f}",
        )
        for stage, (info, worker) in enumerate(zip(infos, workers, strict=True))
    ]
    lines = [_HEAD, *rows] if any(row[-1] for row in rows) else [row[:-1] for row in (_HEAD, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    name = schedule if "\n" not in schedule and len(schedule) < 40 else "given as text"
    head = f"DistributedPipeline: schedule {name}, {chunks} micro-batches" + (
        ", activations rematerialized" if rematerialize else ""
    )
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([head, *table])


# Actions of each worker, with their begin and end in seconds.
Events = Sequence[Sequence[tuple[Action, float, float]]]

_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


def check_path(path: str | os.PathLike[str]) -> None:
    """Raise ValueError unless the path ends in .json, and FileNotFoundError without its folder."""
    if Path(path).suffix.lower() != ".json":
        raise ValueError(f"{os.fspath(path)!r}: a trace is a Chrome trace, with a path that ends in .json")
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"{os.fspath(path)!r}: there is no folder {str(Path(path).parent)!r} for the trace")


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
