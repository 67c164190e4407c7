"""``print(pipe)``: the layers of each stage, their places and sizes."""

from __future__ import annotations

from collections.abc import Sequence

from torch_ucx_rpc.pipeline._partition import StageInfo

__all__ = ["table"]

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
    columns = len(_HEAD) if any(row[-1] for row in rows) else len(_HEAD) - 1
    widths = [max(len(row[column]) for row in (_HEAD, *rows)) for column in range(columns)]

    def line(row: Sequence[str]) -> str:
        cells = [
            row[column].rjust(width) if column in {0, 3, 4} else row[column].ljust(width)
            for column, width in enumerate(widths)
        ]
        return "  ".join(cells).rstrip()

    name = schedule if "\n" not in schedule and len(schedule) < 40 else "given as text"
    head = f"DistributedPipeline: schedule {name}, {chunks} micro-batches" + (
        ", activations rematerialized" if rematerialize else ""
    )
    return "\n".join([head, line(_HEAD), *map(line, rows)])
