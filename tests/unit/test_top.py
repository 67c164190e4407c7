"""The tables of ``top`` at the widths of terminals; ``e2e/test_statistics`` tests their contents."""

from __future__ import annotations

import argparse
import dataclasses
import io

import pytest
from rich.console import Console

from _torch_ucx_rpc_cli import ExitCode, main
from torch_ucx_rpc import Latencies, PeerStatistics, Statistics
from torch_ucx_rpc._cli import top
from torch_ucx_rpc._cli._console import console
from torch_ucx_rpc._observe.statistics import BUCKET_ENDS_US, ServiceStatistics

SLOW_US = 12_345


def latencies() -> Latencies:
    counts = [int(end > SLOW_US) for end in BUCKET_ENDS_US]
    first = counts.index(1)
    return Latencies(
        counts=tuple(1000 if index == first else 0 for index in range(len(counts))), sum_us=1000.0 * SLOW_US
    )


def statistics(rank: int, size: int) -> Statistics:
    numbers = {field.name: 123_456_789 for field in dataclasses.fields(Statistics)}
    peer_numbers = {field.name: 123_456_789 for field in dataclasses.fields(PeerStatistics)}
    peers = tuple(
        PeerStatistics(
            **{
                **peer_numbers,
                "name": f"trainer{other}",
                "rank": other,
                "host": "a-host-with-a-long-name.cluster.example",
                "state": "present",
                "lanes": ("rc_mlx5/mlx5_0:1", "tcp/eth0"),
                "latencies": latencies(),
            }
        )
        for other in range(size)
    )
    few = {"threads": 8, "requests_running": 7, "requests_waiting": 65, "window_waiting_messages": 4, "calls_open": 321}
    return Statistics(
        **{
            **numbers,
            **few,
            "name": f"trainer{rank}",
            "rank": rank,
            "peers": peers,
            "services": (),
            "prometheus_port": None,
        }
    )


def picture(width: int, **options: bool) -> list[str]:
    view = top.View(
        1.0, {0: statistics(0, 3), 1: statistics(1, 3), 2: "failed", 3: "an error that is long: " + 99 * "x"}
    )
    arguments = argparse.Namespace(**{"peers": False, "services": False, **options})
    out = Console(width=width, file=io.StringIO())
    out.print(top._picture(None, view, arguments, out))
    return out.file.getvalue().splitlines()


@pytest.mark.parametrize("options", [{}, {"peers": True}])
def test_80_columns_cut_no_figure_and_name_the_omissions(options: dict[str, bool]) -> None:
    lines = picture(80, **options)
    assert max(map(len, lines)) <= 80
    head = lines[1].split()
    assert {"calls", "p99", "state" if options else "failed"} <= set(head)
    wide = picture(300, **options)[1].split()
    text = " ".join(" ".join(lines).split())
    below = text.partition("a wider terminal has: ")[2].split(", ")
    assert sorted([*head, *below]) == sorted(wide)
    rows = [line.split() for line in lines if line.startswith(" trainer")]
    whole = {word for line in picture(300, **options) for word in line.split()}
    assert len(rows) == (6 if options else 2)
    for row in rows:
        # Names of hosts and lanes may be cut, but no figure.
        assert {word for word in row if "…" not in word} <= whole
        assert "…" not in "".join(row[-2:])


def test_a_wide_terminal_has_all_columns() -> None:
    lines = picture(200)
    assert "wider" not in "".join(lines)
    assert len(lines[1].split()) == 13


def test_error_of_one_worker_keeps_the_figures_of_others() -> None:
    lines = picture(120)
    assert any(line.startswith(" 3 ") and line.rstrip().endswith("…") for line in lines)
    assert {"calls", "p99", "failed", "pool"} <= set(lines[1].split())


def test_names_that_look_like_markup_appear_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["score[fp16]", "score[int8]", "score[/x]", ":cat:"]
    services = tuple(ServiceStatistics(name=name, replicas=(), calls=1, errors=0, open=0) for name in names)
    view = top.View(1.0, {0: dataclasses.replace(statistics(0, 1), name="ps:cat:0", services=services)})
    out = console(argparse.Namespace())
    out.print(top._picture(None, view, argparse.Namespace(peers=False, services=True), out))
    shown = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if "ps" in line]
    assert shown == [[name, "ps:cat:0"] for name in sorted(names)]


def test_each_table_is_written_at_once_to_a_pipe() -> None:
    out = Console(width=120, file=io.StringIO())
    workers = [dataclasses.replace(statistics(0, 1), name=f"trainer{count}") for count in range(3)]
    first, *later = (top.View(float(count), {0: worker}) for count, worker in enumerate(workers))
    written = []

    class Job:
        def view(self) -> top.View:
            written.append(out.file.getvalue())
            return later.pop(0) if later else top.View(9.0, {})

    arguments = argparse.Namespace(peers=False, services=False, interval=0.001)
    top._watch(Job(), out, first, arguments)
    for count, text in enumerate(written):
        assert f"trainer{count}" in text
        assert f"trainer{count + 1}" not in text
    assert out.file.getvalue().endswith("top: the workers on this host have ended.\n")


@pytest.mark.parametrize("interval", ["0", "nan", "inf", "1e300"])
def test_an_interval_that_cannot_be_waited_is_refused(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["top", "--interval", interval])
    assert ended.value.code == ExitCode.WRONG_ARGUMENTS
    assert "--interval must be a number of seconds above 0" in capsys.readouterr().err
