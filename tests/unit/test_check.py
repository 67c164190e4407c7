"""``python -m torch_ucx_rpc check``: what it finds, and what it makes of it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from _torch_ucx_rpc_cli import ExitCode, main
from tests.support.labs import VirtualHosts, needs_virtual_hosts
from torch_ucx_rpc._cli._console import with_progress
from torch_ucx_rpc._cli.check import Pair, Place, judge

PLACE = Place(host="a", machine="1", ipc="ipc:[1]", address="10.0.0.1", infiniband=[], has_cuda=False, tls=None)
ELSEWHERE = dataclasses.replace(PLACE, host="b", machine="2", ipc="ipc:[2]", address="10.0.0.2")
PAIR = Pair(caller="w0", callee="w1", lanes=["sysv/memory"], latency_us=100.0, bytes_per_s=1e9, route="eth0")


def verdict(pair: Pair, callee: Place, caller: Place = PLACE) -> tuple[list[str], list[str]]:
    return judge({"w0": caller, "w1": callee}, [pair])


# ---- Judging ---------------------------------------------------------------------------------------------------------


def test_what_is_as_it_should_be_is_not_commented_upon() -> None:
    assert verdict(PAIR, PLACE) == ([], [])
    assert verdict(dataclasses.replace(PAIR, lanes=["tcp/eth0"]), ELSEWHERE) == ([], [])


def test_tcp_within_one_host_is_a_warning_with_the_cure() -> None:
    [warning], _ = verdict(dataclasses.replace(PAIR, lanes=["tcp/lo"]), PLACE)
    assert "w0 and w1 are both on a and do not use shared memory but tcp/lo" in warning
    place = dataclasses.replace(PLACE, tls="tcp,self")
    [warning], _ = verdict(dataclasses.replace(PAIR, lanes=["tcp/lo"]), place, place)
    assert "UCX_TLS=tcp,self leaves it out" in warning


def test_the_wrong_one_of_two_interfaces_is_a_warning() -> None:
    [warning], _ = verdict(dataclasses.replace(PAIR, lanes=["tcp/eth1"]), ELSEWHERE)
    assert "w0 reaches w1 by tcp/eth1, and the way from a to b is eth0" in warning


def test_infiniband_that_is_there_and_not_used_is_a_warning() -> None:
    here, there = (dataclasses.replace(place, infiniband=["mlx5_0:1"]) for place in (PLACE, ELSEWHERE))
    [warning], _ = verdict(dataclasses.replace(PAIR, lanes=["tcp/eth0"]), there, here)
    assert "both have InfiniBand or RoCE (mlx5_0:1)" in warning
    assert verdict(dataclasses.replace(PAIR, lanes=["rc_mlx5/mlx5_0:1"]), there, here) == ([], [])


def test_only_a_pair_much_slower_than_its_like_is_a_warning() -> None:
    pairs = [dataclasses.replace(PAIR, caller=f"w{i}", latency_us=100.0 + i) for i in range(9)]
    places = {f"w{i}": PLACE for i in range(9)}
    assert judge(places, pairs) == ([], [])
    slow = dataclasses.replace(PAIR, caller="w8", latency_us=5000.0, bytes_per_s=1e7)
    [warning], _ = judge(places, [*pairs[:8], slow])
    assert "w8 to w1 is slower than the other pairs" in warning
    assert "a call takes 5000 us, the median is 104 us; 10.0 MB/s, the median is 1.0 GB/s" in warning


def test_containers_of_one_machine_are_told_how_to_share_memory() -> None:
    beside = dataclasses.replace(ELSEWHERE, machine=PLACE.machine)
    assert verdict(dataclasses.replace(PAIR, lanes=["tcp/eth0"]), beside)[1][0].endswith("would use shared memory")


# ---- Arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-n", "1"], "-n must be at least 2"),
        (["-n", "two"], "invalid int value: 'two'"),
        (["--timeout", "0"], "--timeout must be a number of seconds above 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_without_rich_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(SystemExit):
        main(["check"])
    assert "this command needs the package rich: pip install rich" in capsys.readouterr().err


# ---- Progress --------------------------------------------------------------------------------------------------------


def test_the_bar_is_on_stderr_and_where_that_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(with_progress(iter("abc"), 3, "counting letters")) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    monkeypatch.setenv("TERM", "xterm")
    assert list(with_progress(iter("abc"), 3, "counting letters")) == ["a", "b", "c"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "counting letters" in err
    assert "100%" in err


def test_without_rich_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert list(with_progress(iter("abc"), 3, "counting letters")) == ["a", "b", "c"]


# ---- Run -------------------------------------------------------------------------------------------------------------

COMMAND = [sys.executable, "-m", "torch_ucx_rpc", "check"]


def environment(**variables: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    return {**ours, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}


def test_alone_it_starts_workers_and_exits_by_its_warnings() -> None:
    done = subprocess.run([*COMMAND, "--json"], env=environment(), capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert [(pair["caller"], pair["callee"]) for pair in report["pairs"]] == [
        ("worker0", "worker1"),
        ("worker1", "worker0"),
    ]
    assert all(pair["latency_us"] > 0 and pair["bytes_per_s"] > 0 for pair in report["pairs"])
    assert report["warnings"] == report["errors"] == []
    done = subprocess.run(COMMAND, env=environment(UCX_TLS="tcp,self"), capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.WARNINGS, done.stderr
    assert "WARNING: worker0 and worker1 are both on" in done.stdout
    assert "UCX_TLS=tcp,self leaves it out" in done.stdout


def test_workers_that_do_not_come_have_an_exit_code_of_their_own() -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [*COMMAND, "--timeout", "0.5", "--json"]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (ExitCode.UNREACHABLE, ""), done.stderr
    assert "check: " in done.stderr


def test_on_two_hosts_a_dead_interface_is_avoided() -> None:
    needs_virtual_hosts()
    variables = environment(MASTER_ADDR="a", MASTER_PORT="29500", WORLD_SIZE="2")
    with VirtualHosts(["a", "b"]) as hosts:
        for number, host in enumerate(hosts, 1):
            # What UCX prefers, by its packets' size, and what looks as if it led to the other host. UCX looks for
            # interfaces in /sys, which is that of the machine unless it is mounted anew.
            script = f"""
                mount -t sysfs sysfs /sys
                ip link add nowhere type veth peer name end mtu 9000
                ip link set nowhere mtu 9000
                ip addr add 10.99.0.{number}/24 dev nowhere
                ip link set nowhere up
                ip link set end up
            """
            host.run(["sh", "-euc", script], check=True)
        workers = [
            host.popen([*COMMAND, "--json"], env={**variables, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank, host in enumerate(hosts)
        ]
        report = json.loads(workers[0].communicate()[0])
        workers[1].communicate()
    assert [pair["lanes"] for pair in report["pairs"]] == [["tcp/eth0"], ["tcp/eth0"]]
    assert [report["workers"][name]["address"] for name in ("worker0", "worker1")] == ["10.78.0.1", "10.78.0.2"]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert report["warnings"] == report["errors"] == []
