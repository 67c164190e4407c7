"""A picture of a step: which stage did which micro-batch when."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch_ucx_rpc.pipeline.schedule import Action, parse

__all__ = ["writer_of"]

# What each worker did: an action's text, and when it began and ended, in seconds.
Events = Sequence[Sequence[tuple[str, float, float]]]

_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
# Of ColorBrewer's Paired: told apart without colours too, by their lightness.
_COLOURS = {"F": "#a6cee3", "B": "#1f78b4", "I": "#33a02c", "W": "#b2df8a"}


def writer_of(path: str | os.PathLike[str]) -> Callable[[Any, Events, Sequence[str]], None]:
    """What writes this kind of file. Raises ValueError for other kinds, ImportError where matplotlib is missing."""
    suffix = Path(path).suffix.lower()
    if suffix == ".json":
        return write_chrome
    if suffix in {".png", ".svg", ".pdf"}:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ImportError("a picture needs matplotlib: pip install matplotlib, or give a .json path") from error
        return write_picture
    raise ValueError(f"{os.fspath(path)!r}: a trace is a picture (.png, .svg, .pdf) or a Chrome trace (.json)")


def _actions(events: Events) -> list[tuple[int, Action, float, float]]:
    return [(row, parse(text)[0][0], begin, end) for row, some in enumerate(events) for text, begin, end in some]


def write_chrome(path: Any, events: Events, workers: Sequence[str]) -> None:
    """For chrome://tracing and Perfetto: a process for each worker, a thread for each stage."""
    actions = _actions(events)
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


def write_picture(path: Any, events: Events, workers: Sequence[str]) -> None:
    """A line for each stage, a box for each action, with the number of its micro-batch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    actions = _actions(events)
    start = min(begin for _, _, begin, _ in actions)
    stages = sorted({(action.stage, row) for row, action, _, _ in actions})
    lines = {stage: place for place, (stage, _) in enumerate(stages)}
    span = 1e3 * (max(end for _, _, _, end in actions) - start)
    figure = Figure(figsize=(10, 1.2 + 0.45 * len(stages)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for _, action, begin, end in actions:
        left, width = 1e3 * (begin - start), 1e3 * (end - begin)
        axes.barh(
            lines[action.stage],
            width,
            left=left,
            color=_COLOURS[action.kind],
            edgecolor="black",
            linewidth=0.4,
            height=0.8,
        )
        if width > span / 120:
            dark = action.kind in {"B", "I"}
            axes.text(
                left + width / 2,
                lines[action.stage],
                str(action.micro_batch),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "black",
            )
    axes.set_yticks(range(len(stages)), [f"stage {stage}, {workers[row]}" for stage, row in stages])
    axes.invert_yaxis()
    axes.set_xlim(0, span)
    axes.set_xlabel("ms since the first forward; the numbers are micro-batches")
    kinds = [kind for kind in _NAMES if any(action.kind == kind for _, action, _, _ in actions)]
    axes.legend(
        handles=[
            Patch(facecolor=_COLOURS[kind], edgecolor="black", linewidth=0.4, label=_NAMES[kind]) for kind in kinds
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=len(kinds),
        fontsize=8,
        frameon=False,
    ).set_in_layout(True)
    axes.margins(y=0.25)
    figure.savefig(path, dpi=150)
