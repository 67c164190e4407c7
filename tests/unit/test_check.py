"""``python -m torch_ucx_rpc check``: its findings and its report."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from _torch_ucx_rpc_cli import main
from torch_ucx_rpc._cli._console import with_progress
from torch_ucx_rpc._cli.check import Pair, Place, judge

PLACE = Place(host="a", machine="1", ipc="ipc:[1]", address="10.0.0.1", infiniband=[], has_cuda=False, tls=None)
ELSEWHERE = dataclasses.replace(PLACE, host="b", machine="2", ipc="ipc:[2]", address="10.0.0.2")
PAIR = Pair(caller="w0", callee="w1", lanes=["sysv/memory"], latency_us=100.0, bytes_per_s=1e9, route="eth0")


def verdict(pair: Pair, callee: Place, caller: Place = PLACE) -> tuple[list[str], list[str]]:
    return judge({"w0": caller, "w1": callee}, [pair])


# ---- Judging ---------------------------------------------------------------------------------------------------------


def test_good_settings_cause_no_comment() -> None:
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


def test_unused_infiniband_is_a_warning() -> None:
    here, there = (dataclasses.replace(place, infiniband=["mlx5_0:1"]) for place in (PLACE, ELSEWHERE))
    [warning], _ = verdict(dataclasses.replace(PAIR, lanes=["tcp/eth0"]), there, here)
    assert "both have InfiniBand or RoCE (mlx5_0:1)" in warning
    assert verdict(dataclasses.replace(PAIR, lanes=["rc_mlx5/mlx5_0:1"]), there, here) == ([], [])


def test_a_pair_much_slower_than_the_others_is_a_warning() -> None:
    pairs = [dataclasses.replace(PAIR, caller=f"w{i}", latency_us=100.0 + i) for i in range(9)]
    places = {f"w{i}": PLACE for i in range(9)}
    assert judge(places, pairs) == ([], [])
    slow = dataclasses.replace(PAIR, caller="w8", latency_us=5000.0, bytes_per_s=1e7)
    [warning], _ = judge(places, [*pairs[:8], slow])
    assert "w8 to w1 is slower than the other pairs" in warning
    assert "a call takes 5000 us, the median is 104 us; 10.0 MB/s, the median is 1.0 GB/s" in warning


def test_containers_on_one_machine_are_advised_to_share_memory() -> None:
    beside = dataclasses.replace(ELSEWHERE, machine=PLACE.machine)
    assert verdict(dataclasses.replace(PAIR, lanes=["tcp/eth0"]), beside)[1][0].endswith("would use shared memory")


# ---- Arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-n", "1"], "-n must be at least 2"),
        (["-n", "two"], "invalid int value: 'two'"),
        (["--timeout", "0"], "--timeout must be a number of seconds above 0"),
        (["--timeout", "nan"], "--timeout must be a number of seconds above 0"),
        (["--timeout", "inf"], "--timeout must be a number of seconds above 0, at most 1000000; it cannot be inf"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_error_without_rich_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(SystemExit):
        main(["check"])
    assert "this command needs the package rich: pip install rich" in capsys.readouterr().err


# ---- Progress --------------------------------------------------------------------------------------------------------


def test_the_bar_is_on_stderr_if_that_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(with_progress(iter("abc"), 3, "counting letters")) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich write as to a terminal
    monkeypatch.setenv("TERM", "xterm")
    assert list(with_progress(iter("abc"), 3, "counting letters")) == ["a", "b", "c"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "counting letters" in err
    assert "100%" in err


def test_without_rich_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert list(with_progress(iter("abc"), 3, "counting letters")) == ["a", "b", "c"]
