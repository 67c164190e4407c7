"""``init_rpc`` names unsuitable settings and limits of the machine, and the cure."""

from __future__ import annotations

import resource

import pytest

from torch_ucx_rpc._bootstrap import site_settings


def told(**variables: str) -> list[tuple[str, bool]]:
    return [(conflict.problem, conflict.is_fatal) for conflict in site_settings.of_settings(variables)]


@pytest.mark.parametrize("transports", ["self", "cma", "self,cma", "cuda,self", "cuda_ipc,cuda_copy", "knem"])
def test_transports_without_a_network_are_refused(transports: str) -> None:
    [(problem, is_fatal)] = told(UCX_TLS=transports)
    assert problem.startswith(f"UCX_TLS={transports} leaves no transport")
    assert is_fatal


@pytest.mark.parametrize(
    "transports",
    [
        "all",
        "",
        "sm",
        "shm,self",
        "tcp",
        "self,tcp",
        "^cma",
        "^self",
        "rc,sm",
        "rc_x:aux",
        "cuda,sm",
        "\\tcp",
        "ib",
        "ud",
    ],
)
def test_transports_that_reach_a_worker_cause_no_warning(transports: str) -> None:
    assert told(UCX_TLS=transports) == []


def test_without_peer_errors_shared_memory_is_not_used() -> None:
    assert told(UCX_MM_ERROR_HANDLING="y") == []
    [(problem, is_fatal)] = told(UCX_MM_ERROR_HANDLING="n")
    assert problem.endswith("cannot use shared memory and take TCP")
    assert not is_fatal
    [(problem, is_fatal)] = told(UCX_MM_ERROR_HANDLING="No", UCX_TLS="sm,self")
    assert problem.endswith("which is all that UCX_TLS=sm,self allows")
    assert is_fatal


@pytest.mark.parametrize(("handling", "stops"), [("bt", False), ("none", False), ("bt,freeze", True), ("debug", True)])
def test_error_handling_that_stops_a_worker_causes_a_warning(handling: str, stops: bool) -> None:
    assert [
        problem.startswith(f"with UCX_HANDLE_ERRORS={handling} a worker")
        for problem, _ in told(UCX_HANDLE_ERRORS=handling)
    ] == [True] * stops


def test_blocking_connects_cause_a_warning() -> None:
    [(problem, is_fatal)] = told(UCX_TCP_CONN_NB="n")
    assert "holds up all other calls" in problem
    assert not is_fatal


def limited(monkeypatch: pytest.MonkeyPatch, more: int, world_size: int) -> list[site_settings.Problem]:
    is_open = 10
    monkeypatch.setattr(site_settings.Path, "iterdir", lambda path: range(is_open))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (is_open + more, 1 << 20))
    return list(site_settings.of_files(world_size))


def test_too_few_files_fail_the_agent_or_warn_about_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert limited(monkeypatch, 1014, world_size=100) == []
    [warning] = limited(monkeypatch, 1014, world_size=1000)
    assert "not enough to call all of 1000 workers" in warning.problem
    assert warning.cure.endswith("ulimit -n 65536")
    assert not warning.is_fatal
    [error] = limited(monkeypatch, 20, world_size=2)
    assert "may open 30 files, has 10 open" in error.problem
    assert error.is_fatal
