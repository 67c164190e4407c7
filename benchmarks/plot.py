"""Draws the results in a file of ``python -m benchmarks --json FILE``.

    python -m benchmarks.plot FILE [--folder docs/figures]

It plots latency, throughput and memory over the size; a call's share and memory over the calls in flight; and the life
of a job over its workers. Lines are medians over the rounds, and bands go from the lowest to the highest round. It also
plots latency and throughput of other libraries: medians, with whiskers.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

# Keep text as text: the outlines of letters would be most of a file.
matplotlib.rcParams["svg.fonttype"] = "none"
# Without this, ids are random, and two drawings of the same figures differ.
matplotlib.rcParams["svg.hashsalt"] = "torch_ucx_rpc"

COLORS = {"UCX": "#1f6f43", "TensorPipe": "#c0392b", "UCX, tcp": "#76b58f", "TensorPipe, uv": "#e39a90"}


def draw(
    rounds: dict[str, list[dict[str, float]]],
    file: Path,
    *,
    title: str,
    x_of: Callable[[str], float | None],
    x_label: str,
    y_label: str,
    y_of: Callable[[float, float], float] = lambda _, y: y,
    y_scale: str = "log",
) -> None:
    """Draw a line for each contender, on logarithmic axes. The points are the figures whose name ``x_of`` reads as a
    number."""
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    all_xs: set[float] = set()
    for contender, turns in rounds.items():
        points = []
        # A failed contender lacks some or all figures.
        for name in dict.fromkeys(name for turn in turns for name in turn):
            x = x_of(name)
            if x is not None:
                values = sorted(y_of(x, turn[name]) for turn in turns if name in turn)
                points.append((x, statistics.median(values), values[0], values[-1]))
        if not points:
            continue
        points.sort()
        xs, medians, lowest, highest = zip(*points, strict=True)
        all_xs.update(xs)
        color = COLORS.get(contender)
        axes.plot(xs, medians, marker="o", markersize=3, label=contender, color=color)
        axes.fill_between(xs, lowest, highest, alpha=0.15, color=color)
    axes.set(title=title, xlabel=x_label, ylabel=y_label, xscale="log", yscale=y_scale)
    if len(all_xs) < 10:
        # Label only the measured values: on a short logarithmic axis other labels would overlap.
        ticks = sorted(all_xs)
        axes.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
        axes.minorticks_off()
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


# The picture leaves out these columns of `others`: they are slower ways to use a library.
LEFT_OUT = ("TensorPipe, uv", "UCXX plain", "mpi4py pickled", "gRPC tcp")
GIB_BOTH_WAYS = 2 * 2**26 / 2**30


def draw_others(rounds: dict[str, list[dict[str, float]]], file: Path) -> None:
    """Draw bars for each library: the echo of 1 KB, ten of them at once, and the throughput of 64 MiB."""
    panels: list[tuple[str, str, Callable[[float], float], bool]] = [
        ("1 KB", "echo of 1 KB, us\n(shorter is better)", lambda us: us, True),
        ("1 KB, 10 in flight", "each of ten at once, us\n(shorter is better)", lambda us: us, True),
        ("64 MiB", "64 MiB, both ways, GiB/s\n(longer is better)", lambda us: GIB_BOTH_WAYS / (1e-6 * us), False),
    ]
    names = [name for name, turns in rounds.items() if turns and name not in LEFT_OUT]
    figure, all_axes = plt.subplots(1, len(panels), figsize=(9.6, 0.8 + 0.3 * len(names)), layout="constrained")
    for axes, (row, label, y_of, is_logarithmic) in zip(all_axes, panels, strict=True):
        values = [sorted(y_of(turn[row]) for turn in rounds[name] if row in turn) for name in names]
        medians = [statistics.median(found) if found else 0.0 for found in values]
        reach = [
            (middle - low[0], low[-1] - middle) if low else (0, 0) for middle, low in zip(medians, values, strict=True)
        ]
        colors = [COLORS.get(name, "#8a94a0") for name in names]
        axes.barh(names, medians, xerr=list(zip(*reach, strict=True)), color=colors, height=0.7, error_kw={"lw": 0.8})
        axes.set(xlabel=label, xscale="log" if is_logarithmic else "linear")
        axes.invert_yaxis()
        axes.bar_label(axes.containers[-1], labels=[f" {middle:.3g}" for middle in medians], fontsize=8, padding=2)
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes is not all_axes[0]:
            axes.set_yticks([])
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def work(name: str) -> float | None:
    return float(name) if name.isdecimal() else None


def memory(name: str) -> float | None:
    return float(name.split(",")[0]) if name.endswith("memory") else None


def workers_in_sum(name: str) -> float | None:
    return float(name.split()[0]) if name.endswith("in sum") else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("docs/figures"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rounds: dict[str, Any] = json.loads(arguments.file.read_text(encoding="utf-8"))["rounds"]
    if "sizes" in rounds:
        x_label = "bytes of the tensor"
        draw(
            rounds["sizes"],
            arguments.folder / "latency_by_size.svg",
            title="Echo of one tensor, rpc_sync, p50",
            x_of=work,
            x_label=x_label,
            y_label="us",
        )
        draw(
            rounds["sizes"],
            arguments.folder / "throughput_by_size.svg",
            title="Echo of one tensor, rpc_sync, both ways",
            x_of=work,
            x_label=x_label,
            y_label="GiB/s",
            y_of=lambda size, us: 2 * size / 2**30 / (1e-6 * us),
        )
        draw(
            rounds["sizes"],
            arguments.folder / "memory_by_size.svg",
            title="The callee's peak memory while it echoes tensors",
            x_of=memory,
            x_label=x_label,
            y_label="growth, MiB",
            y_scale="symlog",
        )
    if "calls_in_flight" in rounds:
        draw(
            rounds["calls_in_flight"],
            arguments.folder / "calls_in_flight.svg",
            title="rpc_async of a function without arguments",
            x_of=work,
            x_label="calls in flight",
            y_label="us a call",
        )
        draw(
            rounds["calls_in_flight"],
            arguments.folder / "memory_by_calls.svg",
            title="The callee's peak memory while calls are in flight",
            x_of=memory,
            x_label="calls in flight",
            y_label="growth, MiB",
            y_scale="symlog",
        )
    if "others" in rounds:
        draw_others(rounds["others"], arguments.folder / "beside_others.svg")
    if "workers" in rounds:
        draw(
            rounds["workers"],
            arguments.folder / "workers.svg",
            title="A job's start, init, first call of all pairs, shutdown",
            x_of=workers_in_sum,
            x_label="workers",
            y_label="s",
        )


if __name__ == "__main__":
    main()
